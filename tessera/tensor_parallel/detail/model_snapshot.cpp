#include "tessera/tensor_parallel/detail/model_snapshot.h"

#include "tessera/nn/detail/exchange_hooks.h"
#include "tessera/nn/detail/replicated_over.h"

#include <ATen/core/grad_mode.h>

namespace tessera {

ModelSnapshot::ModelSnapshot(Module& model, const Tensors& inputs)
    : model_(model),
      replicated_over_(tessera::replicated_over(model)),
      random_states_(detail::RngStates::capture(inputs)) {
  for (const auto& p : model.parameters()) parameters_.push_back({p, p.detach(), p.grad(), p.detach()});
  for (const auto& b : model.buffers())
    if (b.defined()) buffers_.push_back({b, b.detach(), {}, {}});
  for (const auto& module : model.modules()) {
    alive_.push_back(module);
    if (auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(module.get()))
      sequentials_.push_back({sequential, {sequential->begin(), sequential->end()}});
    if (!has_hook_point(*module)) continue;
    auto& point = hook_point(*module);
    hooks_.push_back({&point, detail::exchange_hooks(point, nullptr)});
  }
}

// hookable() replaces children of a Sequential by versions with hooks.
void ModelSnapshot::restore_structure() {
  for (auto& [sequential, children] : sequentials_) {
    const auto names = sequential->named_children().keys();
    for (size_t i = 0; i < children.size(); i++) {
      auto& child = *(sequential->begin() + static_cast<ptrdiff_t>(i));
      if (child.ptr() == children[i].ptr()) continue;
      child = children[i];
      sequential->replace_module(names[i], children[i].ptr());
    }
  }
}

void ModelSnapshot::begin_trial() {
  at::NoGradGuard no_grad;
  restore_structure();
  for (const auto& [point, hooks] : hooks_)
    detail::exchange_hooks(*point, hooks ? std::make_shared<detail::ModuleHooks>(*hooks) : nullptr);
  for (auto& p : parameters_) {
    p.tensor.mutable_grad().reset();
    p.tensor.set_data(p.trial);
  }
  for (auto& b : buffers_) b.tensor.set_data(b.data.clone());
  set_replicated_over(model_, replicated_over_);
  random_states_.restore();
}

void ModelSnapshot::replace_parameter(const at::Tensor& parameter, const at::Tensor& value) {
  for (auto& p : parameters_)
    if (p.tensor.is_same(parameter)) p.trial = value;
}

ModelSnapshot::~ModelSnapshot() {
  at::NoGradGuard no_grad;
  restore_structure();
  for (auto& [point, hooks] : hooks_) detail::exchange_hooks(*point, std::move(hooks));
  for (auto& p : parameters_) {
    p.tensor.set_data(p.data);
    p.tensor.mutable_grad() = p.grad;
  }
  for (auto& b : buffers_) b.tensor.set_data(b.data);
  set_replicated_over(model_, replicated_over_);
  random_states_.restore();
}

}  // namespace tessera
