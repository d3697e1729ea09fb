#include "tessera/nn/detail/deferred/tape.h"

#include "tessera/dtensor/detail/meta.h"

#include <algorithm>

namespace tessera::detail::deferred {

Id Tape::add(Value value) {
  values_.push_back(std::move(value));
  return static_cast<Id>(values_.size()) - 1;
}

Id Tape::add(Step step) {
  steps_.push_back(std::move(step));
  return static_cast<Id>(steps_.size()) - 1;
}

// From the last step to the first, with what is still needed at that point: values, to be made; storages, to hold what
// was last written. A view needs its base to be made, not yet to be filled.
std::vector<Id> Tape::recipe(const std::vector<Id>& targets) const {
  std::vector<bool> value_needed(values_.size()), storage_needed(storages_);
  for (const Id v : targets) value_needed[v] = storage_needed[values_[v].storage] = true;
  std::vector<Id> steps;
  for (Id s = next_step() - 1; s >= 0; s--) {
    const auto& step = steps_[s];
    const bool makes = std::any_of(step.outputs.begin(), step.outputs.end(),
                                   [&](Id v) { return v != kNone && values_[v].step == s && value_needed[v]; });
    const bool writes =
        std::any_of(step.written.begin(), step.written.end(), [&](Id v) { return storage_needed[values_[v].storage]; });
    if (!makes && !writes) continue;
    steps.push_back(s);
    if (step.overwrites) storage_needed[values_[step.written[0]].storage] = false;
    for (const auto& [place, v] : step.inputs) {
      value_needed[v] = true;
      const bool is_view = step.written.empty() && !step.outputs.empty() && step.outputs[0] != kNone &&
                           values_[step.outputs[0]].storage == values_[v].storage;
      const bool is_overwritten = step.overwrites && v == step.written[0];
      if (!is_view && !is_overwritten) storage_needed[values_[v].storage] = true;
    }
  }
  std::reverse(steps.begin(), steps.end());
  return steps;
}

const DeferredMeta* deferred_meta(const at::Tensor& t) {
  if (!t.defined() || !t.is_meta() || is_dtensor(t)) return nullptr;
  return dynamic_cast<const DeferredMeta*>(t.unsafeGetTensorImpl()->get_backend_meta());
}

}  // namespace tessera::detail::deferred
