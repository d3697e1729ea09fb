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

// Options of one collective.
struct PostOptions {
  Family family = Family::C10d;  // under which name CommDebugMode counts it
  const char* tensor_name = "";  // shown in records and errors; must outlive the work
};

// One rank's handle of a process group: the collectives, over any c10d::Backend. comm::Group is a pointer to it.
//
// The collectives work in place, as in c10d. They return after posting; call work.wait() before you read the result.
// All ranks of a group must call its collectives in the same order. The functional collectives, which return new
// tensors, are in comm/functional_collectives.h.
// A Communicator is a custom class of the dispatcher (tessera::Group in schemas), so ops take the group as an argument
// and no registry of names is needed.
//
// Example:
//   ts::comm::Group group = ts::World::current().new_group({0, 1}, "pair");
//   group->all_reduce(x, ts::ReduceOp::Sum).wait();
class Communicator final : public torch::CustomClassHolder {
 public:
  // Wraps a connected backend. No communication.
  // Requires: `ranks` are the global ranks of the members, in any order, the same on every member; ranks[rank] is the
  // global rank of this process.
  Communicator(std::string name, std::vector<int64_t> ranks, int64_t rank, c10::intrusive_ptr<c10d::Backend> backend,
               c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds timeout);
  ~Communicator() override;

  const std::string& name() const { return name_; }                     // "world", "dp", "tp", ..., as in messages
  const std::vector<int64_t>& ranks() const { return ranks_; }          // global ranks, in group order
  int64_t rank() const { return rank_; }                                // this rank's index in ranks()
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }  // number of ranks
  const char* backend_name() const;                                     // "gloo", "shm", ...
  std::chrono::milliseconds timeout() const { return timeout_; }        // of each collective
  // The same group (backend, sequence numbers, pending results) with another name. A mesh axis uses its own name.
  c10::intrusive_ptr<Communicator> alias(std::string name) const;
  // Fails all operations of all members, in flight and later ones, with a CommError that contains `reason`. The group
  // is unusable afterwards.
  void abort(const std::string& reason);
  void close();  // leaves the group; no call may follow

  // The collectives, in place, as in c10d. Ranks (source, target, to, from) are indices in ranks().
  using Options = PostOptions;
  Work all_reduce(at::Tensor& x, ReduceOp op, Options = {});                          // result in x
  Work all_reduce_coalesced(std::vector<at::Tensor> xs, ReduceOp op, Options = {});   // one collective for all xs
  Work all_gather_into_tensor(at::Tensor& out, const at::Tensor& in, Options = {});   // out: (size * n0, ...)
  Work all_gather(std::vector<at::Tensor> outs, const at::Tensor& in, Options = {});  // outs may differ in size
  Work all_gather_coalesced(std::vector<at::Tensor> outs, std::vector<at::Tensor> ins, Options = {});  // one collective
  Work reduce_scatter_tensor(at::Tensor& out, const at::Tensor& in, ReduceOp op, Options = {});  // in: (size * n0, ...)
  // `ins` may differ in size.
  Work reduce_scatter(at::Tensor& out, std::vector<at::Tensor> ins, ReduceOp op, Options = {});
  // One collective for all tensors.
  Work reduce_scatter_coalesced(std::vector<at::Tensor> outs, std::vector<at::Tensor> ins, ReduceOp op, Options = {});
  Work broadcast(at::Tensor& x, int64_t source, Options = {});  // x of the source, on every rank
  Work scatter(at::Tensor& out, std::vector<at::Tensor> ins, int64_t source, Options = {});  // ins: only at the source
  // `outs`: only at the target.
  Work gather(std::vector<at::Tensor> outs, const at::Tensor& in, int64_t target, Options = {});
  Work reduce(at::Tensor& x, int64_t target, ReduceOp op, Options = {});  // result only at the target
  // Splits are the numbers of rows (dim 0) sent to and received from each rank. Empty: equal parts.
  Work all_to_all_single(at::Tensor& out, const at::Tensor& in, at::IntArrayRef out_splits, at::IntArrayRef in_splits,
                         Options = {});
  Work all_to_all(std::vector<at::Tensor> outs, std::vector<at::Tensor> ins, Options = {});  // one tensor per rank
  Work send(const at::Tensor& x, int64_t to, int tag = 0, Options = {});                     // `to`: index in ranks()
  Work recv(at::Tensor& x, int64_t from, int tag = 0, Options = {});                         // `from`: index in ranks()
  Work barrier(Options = {});  // completes when all ranks have called it

  // This group as a c10d::ProcessGroup, for code that takes one (for example c10d::Reducer). Created at first use.
  c10::intrusive_ptr<c10d::ProcessGroup> process_group();
  // The group of a c10d::ProcessGroup. See tessera::group_from in comm/collectives.h.
  static c10::intrusive_ptr<Communicator> from(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group);
  const c10::intrusive_ptr<c10d::Backend>& backend() const { return backend_; }  // what carries the collectives
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }        // of the members; may be null

  // Used by the functional collectives: results before their wait() (comm/functional_collectives.h).
  void add_pending(const at::Tensor& result, Work work);
  Work take_pending(const at::Tensor& result);  // an empty Work if the tensor is not pending
  size_t pending() const;                       // number of pending results
  uint64_t sequence() const;                    // number of collectives posted so far

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
  Work post(CommKind kind, Options options, int64_t bytes, c10::ScalarType dtype, Call&& call);
};

// A process group, as seen from one of its ranks. Copies share it.
using Group = c10::intrusive_ptr<Communicator>;

}  // namespace tessera::comm
