#pragma once
#include "tessera/base/visit.h"
#include "tessera/comm/communicator.h"
#include "tessera/data_parallel/comm_hook.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

namespace data_parallel::fsdp {
struct ShardedModule;
struct ScheduledGroup;
}  // namespace data_parallel::fsdp

// Whether a module's parameters are resharded after forward.
//   none       yes, except those of the root module
//   true       yes: backward all-gathers them again
//   false      no: they stay unsharded until backward has used them. Faster, more memory
//   a number   they are resharded among groups of that many ranks, which must divide the number of ranks. Backward then
//              all-gathers within such a group. 1 is false. All ranks is true.
class ReshardAfterForward {
 public:
  // None.
  ReshardAfterForward() = default;
  // True or false.
  template <std::same_as<bool> B>
  ReshardAfterForward(B reshard) : reshard_(reshard) {}  // NOLINT(google-explicit-constructor)
  // A number of ranks.
  template <std::integral I>
  requires(!std::same_as<I, bool>) ReshardAfterForward(I ranks)  // NOLINT(google-explicit-constructor)
      : ranks_(static_cast<int64_t>(ranks)) {}

  // Internal: writes the setting to a group's schedule. Throws UsageError if the number does not divide the ranks.
  void apply(data_parallel::fsdp::ScheduledGroup& scheduled, const comm::Group& shard_group) const;

 private:
  std::optional<bool> reshard_;
  std::optional<int64_t> ranks_;
};

// An all-gather in flight, started by FSDPModule::unshard(true).
class UnshardHandle {
 public:
  // An empty handle: wait() does nothing. The second constructor is internal.
  UnshardHandle() = default;
  explicit UnshardHandle(std::shared_ptr<data_parallel::fsdp::ScheduledGroup> scheduled)
      : scheduled_(std::move(scheduled)) {}
  // The parameters are unsharded when it returns.
  void wait();

 private:
  std::shared_ptr<data_parallel::fsdp::ScheduledGroup> scheduled_;
};

// The methods that PyTorch's fully_shard() adds to a module. Setters with `recurse` also apply to the sharded modules
// below it.
// Example:  fsdp_module(model).set_requires_gradient_sync(false);
class FSDPModule {
 public:
  // Internal; write fsdp_module(model).
  FSDPModule(std::shared_ptr<data_parallel::fsdp::ShardedModule> state, torch::nn::Module& module);

  // All-gathers the parameters of this module, not those of sharded modules below it. With async_op it only starts the
  // all-gather.
  UnshardHandle unshard(bool async_op = false);
  // Frees the unsharded parameters of this module.
  void reshard();

  // False: backward keeps unsharded gradients on this rank, as .grad. A later backward with sync reduces them, also
  // those of modules that it does not use. zero_grad() discards them.
  void set_requires_gradient_sync(bool sync, bool recurse = true);
  // For HSDP. False: backward reduce-scatters gradients and defers the all-reduce over replicas to a later backward.
  // Until then .grad is the sum over this replica's ranks only.
  void set_requires_all_reduce(bool all_reduce, bool recurse = true);
  // See ReshardAfterForward.
  void set_reshard_after_forward(bool reshard, bool recurse = true);
  // False: backward keeps the unsharded parameters for the next forward, unless they change first. For gradient
  // accumulation.
  void set_reshard_after_backward(bool reshard, bool recurse = true);
  // False: the end of backward does not wait for reductions. Read .grad only after the last backward.
  void set_is_last_backward(bool last);
  // Modules to prefetch in forward, and in backward, instead of the next one in order.
  void set_modules_to_forward_prefetch(const std::vector<std::reference_wrapper<torch::nn::Module>>& modules);
  void set_modules_to_backward_prefetch(const std::vector<std::reference_wrapper<torch::nn::Module>>& modules);
  // Divides the sum of gradients by `factor`, not by the number of ranks.
  void set_gradient_divide_factor(double factor);
  // Replaces the all-gather of this module's parameters, and the reduce-scatter of their gradients; see
  // data_parallel/comm_hook.h. Null: the default.
  void set_custom_all_gather(std::shared_ptr<AllGather> comm);
  void set_custom_reduce_scatter(std::shared_ptr<ReduceScatter> comm);
  // Calls hook(reduced) in each backward with the mean of the gradients of this module on this rank, after the
  // reduce-scatter (HSDP: after the all-reduce) and before they are added to .grad. It may change them in place, for
  // example all-reduce them over more ranks.
  void set_all_reduce_hook(std::function<void(at::Tensor& reduced)> hook);
  // False: backward does not need this module's parameter values (an embedding), so it does not all-gather them.
  void set_unshard_in_backward(bool unshard);
  // Resets the state after an exception. It runs by itself if the exception leaves the outermost forward or backward().
  // Call it if you caught the exception inside.
  void reset_iter_state();

 private:
  template <class F>
  void for_each(bool recurse, F f);

  std::shared_ptr<data_parallel::fsdp::ShardedModule> state_;
  torch::nn::Module* module_;
};

// The FSDPModule of a module that was given to fully_shard() or FullyShardedDataParallel. Throws UsageError for other
// modules. The second overload takes a holder.
FSDPModule fsdp_module(torch::nn::Module& module);
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> FSDPModule fsdp_module(const H& holder) {
  return fsdp_module(static_cast<torch::nn::Module&>(*holder.ptr()));
}

namespace detail {

// Runs `call` like forward of the module, with unsharded parameters. Only calls it if the module is not sharded.
Tensors run_as_forward(torch::nn::Module& module, const Tensors& inputs,
                       const std::function<Tensors(const Tensors&)>& call);

}  // namespace detail

// Returns a function that calls `method` with unsharded parameters and reshards them afterwards, as for forward.
// C++ cannot replace the method itself: call the returned function.
// Example:  auto encode = register_fsdp_forward_method(model, &ModelImpl::encode);    y = encode(x);
template <class H, class Method>
auto register_fsdp_forward_method(H& holder, Method method) {
  return [module = holder.ptr(), method](auto... args) {
    using R = decltype(((*module).*method)(args...));
    static_assert(!std::is_void_v<R>, "a forward method must return its result");
    auto given = std::make_tuple(std::move(args)...);
    std::optional<R> result;
    const auto outputs = detail::run_as_forward(*module, tensors_of(given), [&](const Tensors& inputs) {
      assign_tensors(given, inputs);
      result.emplace(std::apply([&](auto&... each) { return ((*module).*method)(each...); }, given));
      return tensors_of(*result);
    });
    assign_tensors(*result, outputs);
    return std::move(*result);
  };
}

}  // namespace tessera
