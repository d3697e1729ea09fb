#include "tessera/propagate/detail/decision.h"

#include <algorithm>

namespace tessera::propagate {

DecisionCache& decision_cache(detail::MeshState& mesh) {
  auto& slot = mesh.attachments[static_cast<size_t>(detail::MeshSlot::Decisions)];
  if (C10_UNLIKELY(!slot)) slot = std::make_unique<DecisionCache>();
  return static_cast<DecisionCache&>(*slot);
}

Decision* DecisionCache::find(const OpEntry& entry, const Key& key, uint64_t hash) {
  if (C10_UNLIKELY(rules_version_ != rules::registry().version())) clear();
  if (C10_LIKELY(entry.id < tables_.size())) {
    auto& slots = tables_[entry.id].slots;
    if (const size_t mask = slots.size() - 1; !slots.empty())
      for (size_t i = hash & mask; slots[i]; i = (i + 1) & mask)
        if (slots[i]->hash == hash && key.equals(slots[i]->key)) {
          hits_++;
          return slots[i].get();
        }
  }
  misses_++;
  return nullptr;
}

Decision& DecisionCache::insert(const OpEntry& entry, std::unique_ptr<Decision> decision) {
  if (size_ >= kMost) clear();
  if (entry.id >= tables_.size()) tables_.resize(std::max(entry_count(), entry.id + 1));
  auto& table = tables_[entry.id];
  auto place = [&](std::unique_ptr<Decision> d) -> Decision& {
    const size_t mask = table.slots.size() - 1;
    size_t i = d->hash & mask;
    while (table.slots[i]) i = (i + 1) & mask;
    table.slots[i] = std::move(d);
    return *table.slots[i];
  };
  if ((table.used + 1) * 2 > table.slots.size()) {
    std::vector<std::unique_ptr<Decision>> old(std::max<size_t>(8, table.slots.size() * 2));
    old.swap(table.slots);
    for (auto& d : old)
      if (d) place(std::move(d));
  }
  table.used++;
  size_++;
  return place(std::move(decision));
}

void DecisionCache::clear() {
  tables_.clear();
  size_ = 0;
  rules_version_ = rules::registry().version();
}

}  // namespace tessera::propagate
