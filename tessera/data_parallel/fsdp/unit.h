#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/data_parallel/fsdp/shard_layout.h"
#include "tessera/nn/grad_hooks.h"
#include "tessera/nn/saved_tensor_hooks.h"
#include "tessera/placement/tensor_spec.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

// A unit of fully sharded data parallelism: parameters that are gathered, computed with, let go of, and whose gradients
// are reduced, together. It knows nothing of modules: who calls what when is the schedule's affair (schedule.h).
//
// A parameter is one object, in modules and optimizers, with two forms:
//
//   sharded   this rank's piece. Per parameter: a distributed tensor of the whole shape. Flat: its run of the shard,
//   1-D whole     a view of a gathered buffer, as forward computes with it (a tensor over tp, if it is cut over that,
//   too)
//
// set_data turns it from one to the other; versions, hooks and handles stay. What autograd saves of a whole parameter
// is kept as "unit, offset, strides" and looked up when backward needs it, so the buffer can go meanwhile.
namespace tessera::data_parallel::fsdp {

struct Member {
  std::string name;
  at::Tensor handle;
  SpecRef outer = {};    // whole: laid out over other axes like this; null: plain
  SpecRef sharded = {};  // sharded: a distributed tensor like this; null: 1-D, and plain
};

struct UnitOptions {
  std::optional<c10::ScalarType> param_dtype = {};   // of the whole form; none: the shard's
  std::optional<c10::ScalarType> reduce_dtype = {};  // of gradients on the wire; none: the whole form's
  bool flat_parameter = false;                       // gradients belong to one flat parameter, not to the members
  bool keep_low_precision_grads = false;             // reduced gradients stay in the dtype they were reduced in
  bool offload = false;  // the shard and its gradient live on the CPU, never in the memory that is computed with
};

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  // Without members it does nothing: the root of a tree whose parameters all belong to inner units.
  // Takes the members' values, each rank its piece, and turns them into their sharded form. `shards` cut, `replicas`
  // hold the same pieces (null: nobody does).
  Unit(std::string name, std::vector<Member> members, ShardLayout layout, comm::Group shards, comm::Group replicas,
       UnitOptions options);
  ~Unit();
  Unit(const Unit&) = delete;

  const std::string& name() const { return name_; }
  const std::vector<Member>& members() const { return members_; }
  const ShardLayout& layout() const { return layout_; }
  const at::Tensor& flat() const { return flat_; }  // the shard, a leaf; its .grad is the reduced gradients'
  const comm::Group& shards() const { return shards_; }
  const comm::Group& replicas() const { return replicas_; }  // null: nobody has the same pieces
  const UnitOptions& options() const { return options_; }

  c10::Device device() const { return device_; }  // where members are computed with

  // Members are gathered in the shard's dtype, whatever param_dtype says. Requires: not gathered.
  void set_full_precision(bool full) { full_precision_ = full; }
  void gather();  // posts the all-gather, if the unit is sharded
  void open();    // the members are whole
  void close();   // the members are sharded, and the buffer is let go of
  // Before close: writes to whole members are meant. Kept: this rank's part of what changed goes into the shard.
  void settle_writes(bool keep);
  bool is_open() const { return open_; }
  bool is_gathered() const { return open_ || gathered_.defined(); }

  // Takes over what autograd saves of this unit's whole members.
  const PackerRef& packer() const { return packer_; }
  // Called when backward needs a saved tensor, before it is looked up.
  void on_need(std::function<void()> call) { on_need_ = std::move(call); }

  // A backward that may reach this unit begins: keeps the gradients that are there aside. on_complete: called once all
  // gradients that this backward computes have come.
  void begin_backward(std::function<void()> on_complete);
  bool in_backward() const { return in_backward_; }
  void post_reduction();    // of what has come
  void finish_reduction();  // waits, adds to the gradients kept aside, and shows them
  bool reducing() const { return reduced_.defined(); }
  void end_backward();  // without a reduction: what has come is kept for the next
  void abandon();       // after an error: sharded, nothing pending, the gradients kept aside are shown again

 private:
  at::Tensor sharded_form(size_t i, const at::Tensor& shard) const;
  at::Tensor whole_form(size_t i, const at::Tensor& view) const;
  void gradient_came(size_t i);
  void show_gradients();
  Unpack keep(const at::Tensor& saved);
  int64_t version() const;  // changes when a member is written to
  int64_t all_ranks() const;
  c10::ScalarType whole_dtype() const;
  bool computes_in_shard() const;  // whole members are views of the shard: nothing is gathered, cast or brought over
  const at::Tensor& local_of_gradient(const at::Tensor& gradient) const;

  std::string name_;
  std::vector<Member> members_;
  ShardLayout layout_;
  comm::Group shards_, replicas_;
  UnitOptions options_;
  at::Tensor flat_;
  c10::Device device_ = c10::kCPU;  // where members are computed with
  std::vector<GradHookHandle> handles_;
  PackerRef packer_;
  std::function<void()> on_need_;

  at::Tensor wire_;  // what this rank gives to the all-gather
  at::Tensor gathered_;
  std::vector<at::Tensor> wholes_;  // as they lie in it
  std::vector<uint32_t> versions_;  // of the members when they were opened
  bool open_ = false;
  bool full_precision_ = false;

  bool in_backward_ = false;
  size_t missing_ = 0;
  std::function<void()> on_complete_;
  at::Tensor gradients_;           // whole, in the layout of the gathered buffer
  std::vector<char> came_;         // which members are in it
  at::Tensor reduced_;             // on the wire
  std::vector<at::Tensor> aside_;  // gradients from before, by member; or the flat one
};

}  // namespace tessera::data_parallel::fsdp
