#pragma once
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/nn/grad_hooks.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::data_parallel::fsdp {

class ParamGroup;

// What replaces, or follows, the reduction of a group's gradients.
struct ReductionHooks {
  // FSDP1's comm hook: writes this rank's shard of the reduced gradients to `shard`. Divides itself. `unsharded` has
  // the shards of all ranks, one after the other.
  std::function<void(at::Tensor& unsharded, at::Tensor& shard)> reduce_scatter = {};
  std::function<void(at::Tensor& gradient)> all_reduce = {};      // the same without shards, in place
  std::shared_ptr<ReduceScatter> custom_reduce_scatter = {};      // does not divide
  std::function<void(at::Tensor& reduced)> after_reduction = {};  // may change the mean
};

// The gradients of one ParamGroup: accumulates unsharded gradients, reduce-scatters them in one buffer, all-reduces the
// result over replicas (HSDP) and sets .grad of the sharded parameters.
//
// A group of one rank copies nothing: a gradient is itself the shard, unless its dtype differs.
//
//   begin_backward()        moves .grad to the saved gradients
//   (autograd)              each gradient becomes ready; the last one notifies the schedule
//   reduce_scatter()        posts the reduce-scatter over shard_group
//   all_reduce()            waits for it and posts the all-reduce over replicate_group
//   wait_for_reduction()    adds the saved gradients and sets .grad
//
// Gradients that are not reduced yet are .grad between two backward passes, as in DDP: unsharded after a pass without
// reduction, sharded if only the all-reduce over replicas is deferred. So zero_grad() discards them.
//
// A parameter may be unused on some ranks. Each reduction carries one flag per parameter, so that every rank knows
// which parameters have a gradient.
//
// It reads its ParamGroup and writes only to .grad of the group's tensors.
class ParamGroupGradients {
 public:
  // Registers gradient hooks on the parameters. Requires: `group` outlives this object.
  explicit ParamGroupGradients(ParamGroup& group);
  ~ParamGroupGradients();
  ParamGroupGradients(const ParamGroupGradients&) = delete;

  // Starts a backward that may reach the group.
  void begin_backward();
  bool in_backward() const { return in_backward_; }
  bool is_waiting() const { return in_backward_ && num_pending_ > 0; }  // some gradients are not ready
  // Starts the reduce-scatter of the gradients received so far. With all_reduce = false the all-reduce over replicas is
  // deferred to the next call.
  void reduce_scatter(bool all_reduce = true);
  void all_reduce();          // waits for the reduce-scatter and starts the all-reduce over replicas
  void wait_for_reduction();  // waits, adds the saved gradients, and sets .grad
  bool is_reducing() const { return reduced_.defined(); }
  void end_backward();  // without a reduction: ready gradients stay for the next backward
  // After a backward without a reduction, also one that did not reach the group on this rank. Requires a reduction of
  // the group later, even if it is frozen until then. All ranks decide the same: only trainable parameters count.
  void count_unsharded_pass();
  // True if passes before this backward left gradients that a reduction must take along. Equal on all ranks, also if
  // zero_grad() has discarded the gradients.
  bool has_unreduced(bool all_reduce) const {
    return !in_backward_ && !is_reducing() && (has_unsharded_passes_ || (all_reduce && has_deferred_passes_));
  }
  // Takes back the gradients that .grad shows. Returns whether there were any.
  bool take_unreduced();
  bool shows_unreduced() const;  // some .grad is not reduced
  // For code that reduces gradients by itself. Takes those of the backward passes without a reduction, one per
  // parameter, undefined for a parameter without one. .grad shows them no longer.
  std::vector<at::Tensor> take_unsharded();
  // .grad becomes this rank's shard of the result. `reduced` has one tensor per parameter, like those of
  // take_unsharded(), equal on all ranks; an undefined one leaves .grad empty.
  void set_reduced(const std::vector<at::Tensor>& reduced);
  void abandon();  // after an error: frees all gradients and restores the saved .grad

  // .grad while it shows a gradient that is not reduced.
  struct Shown {
    at::Tensor gradient = {};
    int64_t version = 0;
    at::Tensor reduced = {};  // .grad from before
  };
  // What a sharded group keeps from one backward to the next.
  struct State {
    std::vector<at::Tensor> unsharded_grads;  // not reduced
    std::vector<char> ready;                  // which parameters have one
    at::Tensor deferred_all_reduce;           // reduce-scattered, not all-reduced
    std::vector<char> deferred;               // which parameters are in it
    bool has_unsharded_passes, has_deferred_passes;
    std::vector<Shown> shown;
    at::Tensor unsharded_flat_grad;
    std::optional<double> divide_factor;
  };
  State state() const;
  void restore(const State& state);

  // Sets .grad of the flat parameter to the buffer that the parameters' .grad are views of, or to none if there is no
  // such buffer. For code that sets the parameters' .grad without a backward.
  void find_flat_param_grad();
  // Frees .grad of the flat parameter after zero_grad() freed .grad of all parameters, which are views of it.
  void drop_unused_flat_param_grad();

  // Divisor of the gradient sum; none: the number of ranks.
  void set_divide_factor(std::optional<double> factor) { divide_factor_ = factor; }
  ReductionHooks& hooks() { return reduction_hooks_; }

 private:
  void gradient_ready(size_t i);
  bool any_ready() const;
  bool is_alone() const;
  void accumulate_unreduced();
  bool any_trainable() const;
  bool has_shown() const;
  void show_unreduced();
  void show(Shown& shown, const at::Tensor& holder, at::Tensor gradient);
  void take(Shown& shown, const at::Tensor& holder, size_t first_param, size_t end_param);
  void discard_unreduced(size_t i);
  at::Tensor collect_in_one_buffer();
  at::Tensor make_flags(at::TensorOptions options) const;
  void read_flags(const at::Tensor& flags);
  void reduce_scatter_by_hook(const at::TensorOptions& options);
  void reduce_flags(const comm::Group& group);
  void free_unsharded_grads();
  void accumulate(const at::Tensor& reduced_shard);
  bool accumulate_in_place(const at::Tensor& reduced_shard);
  void restore_saved_grads();
  double divide_factor() const;
  double predivide_factor(c10::ScalarType dtype) const;

  ParamGroup& group_;
  std::vector<GradHookHandle> hooks_;
  bool in_backward_ = false;
  size_t num_pending_ = 0;  // gradients that this backward has not computed yet
  std::optional<double> divide_factor_;
  std::vector<at::Tensor> unsharded_grads_;  // per parameter, in shard order
  std::vector<char> ready_;                  // per parameter: unsharded_grads_ has its gradient
  at::Tensor reduced_;                       // output of the collective in flight
  enum class InFlight : uint8_t { None, ReduceScatter, AllReduce } in_flight_ = InFlight::None;
  bool all_reduce_ = true;
  at::Tensor deferred_all_reduce_;        // reduce-scattered gradients that wait for their all-reduce
  std::vector<char> deferred_;            // per parameter: its gradient is in a reduction or in deferred_all_reduce_
  std::vector<at::Tensor> saved_grads_;   // per parameter: .grad from before this backward
  std::vector<Shown> shown_;              // per parameter; one entry for a flat parameter
  at::Tensor unsharded_flat_grad_;        // flat parameter: the buffer that unsharded_grads_ are views of, while shown
  at::Tensor flags_;                      // input of the reduction in flight
  bool has_unsharded_passes_ = false;     // backward passes without reduce-scatter since the last one
  bool has_deferred_passes_ = false;      // the same for the all-reduce
  bool includes_earlier_passes_ = false;  // the reduction in flight has gradients of such passes
  ReductionHooks reduction_hooks_;
  comm::Work custom_work_;   // of the custom reduce-scatter in flight
  at::Tensor custom_input_;  // its input
  std::string label_;        // of the reduction in flight
  int32_t label_number_ = 0;
};

}  // namespace tessera::data_parallel::fsdp
