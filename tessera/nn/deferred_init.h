#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn

// Builds a model without memory for its parameters (PyTorch: the meta device; torchdistx: deferred_init). The
// parameters are on the meta device, and the ops of the constructors are recorded. Distribute the parameters, then call
// materialize(): it allocates and initializes the local shards only.
//
//   auto model = deferred_init([&] { return GPT(config); });
//   for (auto& parameter : model->parameters()) distribute_in_place(parameter, mesh, {Shard(0)});   // no communication
//   materialize(model);
//
// The values are bitwise equal to those of one rank, for every mesh and all placements. Each random fill reserves its
// part of the random sequence of tessera::random when it is recorded, and no value is summed across ranks.
namespace tessera {

namespace detail {

class DeferredInitScope {
 public:
  DeferredInitScope();
  ~DeferredInitScope();
  DeferredInitScope(const DeferredInitScope&) = delete;
  DeferredInitScope& operator=(const DeferredInitScope&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard recording_;
};

}  // namespace detail

// Runs build() and returns its result. Tensors that build() creates, and tensors computed from them, are deferred: they
// are on the meta device, with recorded ops. Tensors that exist before stay real; if a recorded op reads one, it must
// not change before materialize(). torch::tensor({...}) and from_blob create real tensors. A second call continues the
// recording: deferred_init([&] { model->to(torch::kBFloat16); }). A deferred tensor has no values, so item(),
// data_ptr() and the like throw. Outside deferred_init, only metadata queries, views and distribute functions work on
// it; other ops throw.
template <class Build>
decltype(auto) deferred_init(Build&& build) {
  const detail::DeferredInitScope scope;
  return build();
}

// True if `t`, plain or distributed, has no values before materialize().
bool is_deferred(const at::Tensor& t);

// Allocates and initializes the deferred parameters and buffers of a module and its submodules, in place. A plain
// tensor goes to the device that its constructor requested, a distributed one to the device of its mesh, and all go to
// `device` if it is given. Tensors that shared memory share it again. Fills and elementwise arithmetic run on the local
// shard only. Other ops run on the full tensor, one parameter at a time, and the local shard is sliced from it. No
// communication.
// Throws UsageError, and leaves the module unchanged, if no tensor is deferred (for example in a second call), or if a
// tensor is on the meta device but not deferred.
void materialize(torch::nn::Module& module, std::optional<c10::Device> device = {});

// The same for a holder.
template <class Impl>
void materialize(const torch::nn::ModuleHolder<Impl>& module, std::optional<c10::Device> device = {}) {
  materialize(*module.ptr(), device);
}

}  // namespace tessera
