#include "tessera/compile/detail/api/saved_state.h"

#include "tessera/dtensor/detail/meta.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <mutex>

namespace tessera::compiler {

using tessera::detail::local_or_self;

at::Tensor storage_as_tensor(const at::Tensor& local) {
  const at::NoGradGuard no_grad;
  const OpModesOff off;
  const auto elements = static_cast<int64_t>(local.storage().nbytes() / local.itemsize());
  return at::empty({0}, local.options().requires_grad(false)).set_(local.storage(), 0, {elements}, {1});
}

SavedState::SavedState(const std::vector<at::Generator>& generators) : stream_(random::state()) {
  for (auto generator : generators) {
    const std::lock_guard lock(generator.mutex());
    generators_.push_back({generator, generator.get_state()});
  }
}

void SavedState::add_memory(const at::Tensor& t) {
  if (!t.defined() || !local_or_self(t).has_storage() || t._is_zerotensor()) return;  // zeros without memory
  const auto all = storage_as_tensor(local_or_self(t));
  const auto is_same = [&](const auto& each) { return each.first.is_alias_of(all); };
  if (std::any_of(memory_.begin(), memory_.end(), is_same)) return;
  const at::NoGradGuard no_grad;
  const OpModesOff off;
  memory_.emplace_back(all, all.clone());
}

void SavedState::add_gradient(const at::Tensor& parameter) {
  gradients_.emplace_back(parameter, parameter.grad());
  add_memory(parameter.grad());
}

void SavedState::restore() {
  const at::NoGradGuard no_grad;
  const OpModesOff off;
  for (auto& [storage, before] : memory_) storage.copy_(before);
  for (auto& [parameter, gradient] : gradients_) parameter.mutable_grad() = gradient;
  for (auto& each : generators_) {
    const std::lock_guard lock(each.generator.mutex());
    each.generator.set_state(each.state);
  }
  random::state() = stream_;
}

}  // namespace tessera::compiler
