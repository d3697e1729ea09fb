#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/data_parallel/fsdp/detail/engine/buffer_pool.h"
#include "tessera/data_parallel/fsdp/detail/engine/shard_layout.h"
#include "tessera/data_parallel/fsdp/detail/engine/streams.h"
#include "tessera/nn/grad_hooks.h"
#include "tessera/nn/saved_tensor_hooks.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <torch/csrc/autograd/variable.h>

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
//             1-D
//   whole     a view of a gathered buffer, as forward computes with it (a tensor over tp, if it is cut over that, too)
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
  bool offload = false;  // the shard and its gradient are on the CPU, and never the memory that is computed with
};

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  // Without members it does nothing: the root of a tree whose parameters all belong to inner units.
  // Takes the members' values, each rank its piece, and turns them into their sharded form. `shards` cut, `replicas`
  // hold the same pieces (null: nobody does). Members without values yet (deferred_init) become pieces without values.
  Unit(std::string name, std::vector<Member> members, ShardLayout layout, comm::Group shards, comm::Group replicas,
       UnitOptions options);
  ~Unit();
  Unit(const Unit&) = delete;

  const std::string& name() const { return name_; }
  const std::vector<Member>& members() const { return members_; }
  const ShardLayout& layout() const { return layout_; }
  const at::Tensor& flat() const { return flat_; }  // the shard, a leaf; its .grad is the reduced gradients'
  const comm::Group& shards() const { return shards_; }
  const comm::Group& replicas() const { return replicas_; }
  const UnitOptions& options() const { return options_; }
  c10::Device device() const { return device_; }  // that is computed on
  // In a tree of modules: what collectives are labelled with, where they run, where buffers come from.
  struct Place {
    std::string name;
    int32_t number = 0;  // in the tree's list of units
    StreamSet streams = {};
    std::shared_ptr<Arena> arena = {};
  };
  void place(Place place);

  // Members are gathered in the shard's dtype, whatever param_dtype says. Requires: not gathered.
  void set_full_precision(bool full) { full_precision_ = full; }
  void gather();  // posts the all-gather, if the unit is sharded
  void open();    // the members are whole
  void close();   // the members are sharded, and the buffer is let go of
  void hide();    // the members are sharded; the buffer stays, for an open() before the shard is written to
  // close(), but this rank keeps 1/n of the whole, so that the next gather, if the shard is not written to until then,
  // is among the n ranks of `few` alone. Not for flat layouts.
  void close_keeping_part(const comm::Group& few);
  // Before close: writes to whole members are meant. Kept: this rank's part of what changed goes into the shard.
  void settle_writes(bool keep);
  bool is_open() const { return open_; }
  bool is_gathered() const { return gathered_.defined(); }
  bool is_moved() const;  // values were put beside the shard: the next gather() takes them
  bool take_moved();      // takes them now, if there are any

  // Takes over what autograd saves of this unit's whole members.
  const PackerRef& packer() const { return packer_; }
  // Called in backward: before it needs a saved value, and before it has a gradient for a member.
  void on_need(std::function<void(bool values)> call) { on_need_ = std::move(call); }

  // A backward that may reach this unit begins: keeps the gradients that are there aside. on_complete: called once all
  // gradients that this backward computes have come.
  void begin_backward(std::function<void()> on_complete);
  bool in_backward() const { return in_backward_; }
  bool waits_for_gradients() const { return in_backward_ && missing_ > 0; }
  // Of what has come. Without all_reduce: over `shards` alone; the next reduction takes it along.
  void post_reduction(bool all_reduce = true);
  void post_all_reduce();   // waits for the reduction over shards, then posts that over replicas
  void finish_reduction();  // waits, adds to the gradients kept aside, and shows them
  bool reducing() const { return reduced_.defined(); }
  void end_backward();  // without a reduction: what has come is kept for the next
  void abandon();       // after an error: sharded, nothing pending, the gradients kept aside are shown again
  // What a unit that is sharded keeps from one backward for the next.
  struct Carried {
    std::vector<at::Tensor> gradients;  // whole, not reduced yet: which `came`
    std::vector<char> came;
    at::Tensor owed;  // reduced over shards alone: `owes`
    std::vector<char> owes;
    std::optional<double> divide_factor;
  };
  Carried carried() const;
  void carry(const Carried& state);
  // The shard's gradient is that of which the members' are views; none, if there is no such thing. For those who set
  // members' gradients without a backward.
  void find_shard_gradient();

  // By what the sum of gradients is divided; none: the number of ranks.
  void set_divide_factor(std::optional<double> factor) { divide_factor_ = factor; }

 private:
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  // unit.cpp
  void take_values();
  at::Tensor sharded_form(size_t i, const at::Tensor& shard) const;
  at::Tensor whole_form(size_t i, const at::Tensor& view) const;
  void wait_for_gathered();
  void land();
  void show_whole(size_t i, const at::Tensor& whole);
  void show_sharded();
  void let_go();
  c10::ScalarType whole_dtype() const;
  bool computes_in_shard() const;  // whole members are views of the shard: nothing is gathered, cast or brought over
  Unpack keep(const at::Tensor& saved);
  int64_t version() const;  // changes when a member or the shard is written to
  bool is_stale() const { return is_gathered() && !open_ && gathered_version_ != version(); }
  const ShardLayout& gathered_layout() const { return gathered_from_ == few_ && few_ ? *few_layout_ : layout_; }

  // unit_gradients.cpp
  void gradient_came(size_t i);
  bool any_came() const;
  void let_go_of_gradients();
  void add_gradients_aside(const at::Tensor& shard);
  bool add_to_gradients_aside(const at::Tensor& shard);
  void show_gradients();
  void drop_gradient();
  double divide_by() const;
  double before_sum(c10::ScalarType dtype) const;

  std::string name_;
  int32_t number_ = 0;
  std::shared_ptr<Arena> arena_;
  std::vector<Member> members_;
  ShardLayout layout_;
  comm::Group shards_, replicas_;
  UnitOptions options_;
  StreamSet streams_;
  at::Tensor flat_;
  c10::Device device_ = at::kCPU;  // that is computed on
  std::vector<GradHookHandle> handles_;
  PackerRef packer_;
  std::function<void(bool)> on_need_ = [](bool) {};

  at::Tensor wire_;  // what this rank gives to the all-gather
  at::Tensor gathered_, landing_;
  comm::Group gathered_from_;       // shards, or a few of them
  int64_t gathered_version_ = 0;    // of what was gathered
  bool landed_ = false;             // it has come
  std::vector<uint32_t> versions_;  // of the members when they were opened
  bool open_ = false;
  bool full_precision_ = false;
  std::vector<Accumulator> accumulators_;  // of the whole form, where it has another dtype than the sharded one

  // What close_keeping_part() kept.
  comm::Group few_;
  std::optional<ShardLayout> few_layout_;
  at::Tensor part_;
  int64_t part_version_ = 0;

  bool in_backward_ = false;
  size_t missing_ = 0;
  std::function<void()> on_complete_;
  std::optional<double> divide_factor_;
  std::vector<at::Tensor> gradients_;  // whole, by member, as layout_.in_order has them
  std::vector<char> came_;             // which are there
  at::Tensor reduced_;                 // on the wire
  enum class Wire : uint8_t { Shards, Replicas, None } on_wire_ = Wire::None;
  bool all_reduce_ = true;
  at::Tensor owed_;                // reduced over shards and not over replicas yet
  std::vector<char> owes_;         // which members are in it
  std::vector<at::Tensor> aside_;  // gradients from before, by member; or the flat one
};

}  // namespace tessera::data_parallel::fsdp
