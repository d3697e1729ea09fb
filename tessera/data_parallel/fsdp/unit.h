#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/data_parallel/fsdp/arena.h"
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

  void gather_from(std::shared_ptr<Arena> arena) { arena_ = std::move(arena); }  // where buffers come from
  void gather();  // posts the all-gather, if the unit is sharded
  void open();    // the members are whole
  void close();   // the members are sharded, and the buffer is let go of
  // Before close: writes to whole members are meant. Kept: this rank's part of them goes into the shard.
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
  void copy_piece(size_t i, const at::Tensor& whole, const at::Tensor& shard) const;
  void gradient_came(size_t i);
  void show_gradients();
  Unpack keep(const at::Tensor& saved);
  int64_t version() const;  // changes when a member is written to
  int64_t all_ranks() const;
  bool any_came() const;
  double before_sum(c10::ScalarType dtype) const;
  const at::Tensor& local_of_gradient(const at::Tensor& gradient) const;

  std::string name_;
  std::vector<Member> members_;
  ShardLayout layout_;
  comm::Group shards_, replicas_;
  UnitOptions options_;
  at::Tensor flat_;
  std::vector<GradHookHandle> handles_;
  PackerRef packer_;
  std::function<void()> on_need_;

  at::Tensor wire_;  // what this rank gives to the all-gather
  at::Tensor gathered_, landing_;
  std::shared_ptr<Arena> arena_;
  std::vector<uint32_t> versions_;  // of the members when they were opened
  bool open_ = false;

  bool in_backward_ = false;
  size_t missing_ = 0;
  std::function<void()> on_complete_;
  std::vector<at::Tensor> gradients_;  // whole, by member, as layout_.in_order has them
  std::vector<char> came_;             // which are there
  at::Tensor reduced_;                 // on the wire
  std::vector<at::Tensor> aside_;      // gradients from before, by member; or the flat one
};

}  // namespace tessera::data_parallel::fsdp
