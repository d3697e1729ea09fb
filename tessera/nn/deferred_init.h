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

// A model without memory: built as always, but what its constructors do is written down instead of done. Then lay it
// out, and materialize() does it, for this rank's pieces only.
//
//   auto model = deferred_init([&] { return GPT(config); });
//   for (auto& parameter : model->parameters()) distribute_in_place(parameter, mesh, {Shard(0)});   // no communication
//   materialize(model);
//
// The values are those of a single rank, bit for bit, whatever the mesh and the placements: every random fill inside
// takes its place in the stream of tessera::random when it is written down, and nothing is summed across ranks.
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

// Runs build() and gives what it gives. Tensors that are made inside, and all that is computed from them, are deferred:
// tensors on the meta device with a recipe. Real tensors that were there before are left alone; one that a recipe reads
// must not change before materialize(). torch::tensor({...}) and from_blob give real tensors, for the values are at
// hand. A second call goes on where the first stopped: deferred_init([&] { model->to(torch::kBFloat16); }).
// Inside, a deferred tensor has no values: item(), data_ptr() and the like are errors. Outside it may be looked at,
// viewed and distributed; any other op on it is an error.
template <class Build>
decltype(auto) deferred_init(Build&& build) {
  const detail::DeferredInitScope scope;
  return build();
}

// A tensor that waits for materialize(); distributed or not.
bool is_deferred(const at::Tensor& t);

// Fills the deferred parameters and buffers of a module and its children, in place: every handle to them sees it.
// Plain ones go to the device they were asked for on, distributed ones to their mesh's, all to `device` if one is
// given. Those that share memory will share it again. A recipe of fills and elementwise arithmetic runs on this rank's
// piece alone; any other runs whole, one parameter at a time, and the piece is cut from it. No communication.
// Throws UsageError, and leaves the module as it was, if nothing in it is deferred (materialised twice), or if
// something lies on the meta device without a recipe.
void materialize(torch::nn::Module& module, std::optional<c10::Device> device = {});

template <class Impl>
void materialize(const torch::nn::ModuleHolder<Impl>& module, std::optional<c10::Device> device = {}) {
  materialize(*module.ptr(), device);
}

}  // namespace tessera
