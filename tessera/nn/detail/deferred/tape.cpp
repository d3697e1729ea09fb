#include "tessera/nn/detail/deferred/tape.h"

#include "tessera/dtensor/detail/meta.h"

#include <algorithm>

namespace tessera::detail::deferred {

Id Tape::add(Value value) {
  values_.push_back(std::move(value));
  return static_cast<Id>(values_.size()) - 1;
}

Id Tape::add(RecordedOp op) {
  ops_.push_back(std::move(op));
  return static_cast<Id>(ops_.size()) - 1;
}

// Goes from the last op to the first. At each point `value_needed` has the values that must exist, and `storage_needed`
// the storages whose contents matter. A view needs its base to exist, but not yet its contents.
std::vector<Id> Tape::ops_needed_for(const std::vector<Id>& targets) const {
  std::vector<bool> value_needed(values_.size()), storage_needed(storages_);
  for (const Id v : targets) value_needed[v] = storage_needed[values_[v].storage] = true;
  std::vector<Id> needed;
  for (Id id = next_op() - 1; id >= 0; id--) {
    const auto& op = ops_[id];
    const bool makes = std::any_of(op.outputs.begin(), op.outputs.end(),
                                   [&](Id v) { return v != kNone && values_[v].made_by == id && value_needed[v]; });
    const bool writes =
        std::any_of(op.written.begin(), op.written.end(), [&](Id v) { return storage_needed[values_[v].storage]; });
    if (!makes && !writes) continue;
    needed.push_back(id);
    if (op.overwrites) storage_needed[values_[op.written[0]].storage] = false;
    for (const auto& [index, v] : op.inputs) {
      value_needed[v] = true;
      const bool is_view = op.written.empty() && !op.outputs.empty() && op.outputs[0] != kNone &&
                           values_[op.outputs[0]].storage == values_[v].storage;
      const bool is_overwritten = op.overwrites && v == op.written[0];
      if (!is_view && !is_overwritten) storage_needed[values_[v].storage] = true;
    }
  }
  std::reverse(needed.begin(), needed.end());
  return needed;
}

const DeferredMeta* deferred_meta(const at::Tensor& t) {
  if (!t.defined() || !t.is_meta() || is_dtensor(t)) return nullptr;
  return dynamic_cast<const DeferredMeta*>(t.unsafeGetTensorImpl()->get_backend_meta());
}

}  // namespace tessera::detail::deferred
