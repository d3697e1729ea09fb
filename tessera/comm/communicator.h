#pragma once
#include "tessera/base/reduce_op.h"
#include "tessera/comm/work.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class Backend;
class ProcessGroup;
class Store;
}  // namespace c10d

namespace tessera::comm {

struct PostOptions {
  Family family = Family::C10d;
  const char* tensor_name = "";  // shown in records and errors; must outlive the work
};

// One rank's end of a group of ranks: the collectives, over whatever c10d::Backend stands below.
//
// The in-place calls below have c10d's meaning and are recorded as family C10d (DDP, FSDP, distribute_tensor and the
// free collectives use them). The functional ones used by redistribution are registered ops, in comm/ops.h.
// Every call posts and returns; the result may be read after work.wait(). Calls on one group must be made in the same
// order by all its ranks.
// A Communicator is a custom class of the dispatcher (tessera::Group in schemas), so that ops carry it as an argument
// and nothing has to look one up by name.
class Communicator final : public torch::CustomClassHolder {
 public:
  // Requires: `ranks` are the members' global ranks, ascending or not, the same on every member; ranks[rank] is this
  // one.
  Communicator(std::string name, std::vector<int64_t> ranks, int64_t rank, c10::intrusive_ptr<c10d::Backend> backend,
               c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout);
  ~Communicator() override;

  const std::string& name() const { return name_; }             // "world", "dp", "tp", ... as it is shown to people
  const std::vector<int64_t>& ranks() const { return ranks_; }  // global ranks, in group order
  int64_t rank() const { return rank_; }                        // this rank's place in ranks()
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }
  const char* backend_name() const;
  std::chrono::milliseconds timeout() const { return timeout_; }
  // The same group (backend, sequence numbers, pending results) under another name: a mesh axis shows its own.
  c10::intrusive_ptr<Communicator> alias(std::string name) const;
  // Frees every member that waits, now or later, with a CommError that carries `reason`. The group is unusable after.
  void abort(const std::string& reason);
  void close();  // leaves the group; the last call on it

  using Options = PostOptions;
  Work all_reduce(at::Tensor& x, ReduceOp op, Options = {});
  Work all_reduce_coalesced(std::vector<at::Tensor> xs, ReduceOp op, Options = {});
  Work all_gather_into_tensor(at::Tensor& out, const at::Tensor& in, Options = {});   // out: (size * n0, ...)
  Work all_gather(std::vector<at::Tensor> outs, const at::Tensor& in, Options = {});  // outs may differ in size
  Work all_gather_coalesced(std::vector<at::Tensor> outs, std::vector<at::Tensor> ins, Options = {});
  Work reduce_scatter_tensor(at::Tensor& out, const at::Tensor& in, ReduceOp op, Options = {});
  Work reduce_scatter(at::Tensor& out, std::vector<at::Tensor> ins, ReduceOp op,
                      Options = {});  // ins may differ in size
  Work reduce_scatter_coalesced(std::vector<at::Tensor> outs, std::vector<at::Tensor> ins, ReduceOp op, Options = {});
  Work broadcast(at::Tensor& x, int64_t source, Options = {});
  Work scatter(at::Tensor& out, std::vector<at::Tensor> ins, int64_t source, Options = {});  // ins: only at the source
  Work gather(std::vector<at::Tensor> outs, const at::Tensor& in, int64_t target, Options = {});
  Work reduce(at::Tensor& x, int64_t target, ReduceOp op, Options = {});
  // Splits count rows (dim 0) sent to and received from each rank; empty: equal parts.
  Work all_to_all_single(at::Tensor& out, const at::Tensor& in, at::IntArrayRef out_splits, at::IntArrayRef in_splits,
                         Options = {});
  Work all_to_all(std::vector<at::Tensor> outs, std::vector<at::Tensor> ins, Options = {});
  Work send(const at::Tensor& x, int64_t to, int tag = 0, Options = {});
  Work recv(at::Tensor& x, int64_t from, int tag = 0, Options = {});
  Work barrier(Options = {});

  // This group as a c10d::ProcessGroup, for code that takes one (for example c10d::Reducer). Created at first use.
  c10::intrusive_ptr<c10d::ProcessGroup> process_group();
  // The group of a c10d::ProcessGroup. See tessera::group_from in comm/collectives.h.
  static c10::intrusive_ptr<Communicator> from(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group);
  const c10::intrusive_ptr<c10d::Backend>& backend() const { return backend_; }
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

  // Results of functional collectives that nobody has waited for yet (comm/ops.cpp).
  void add_pending(const at::Tensor& result, Work work);
  Work take_pending(const at::Tensor& result);  // an empty Work if there is none
  size_t pending() const;
  uint64_t sequence() const;  // collectives posted so far

 private:
  struct Impl;
  std::string name_;
  std::vector<int64_t> ranks_;
  int64_t rank_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<Impl> impl_;  // shared by aliases

  Communicator(std::string name, const Communicator& same);
  friend class c10::intrusive_ptr<Communicator>;
  template <class Call>
  Work post(Kind kind, Options options, int64_t bytes, c10::ScalarType dtype, Call&& call);
};

using Group = c10::intrusive_ptr<Communicator>;

}  // namespace tessera::comm
