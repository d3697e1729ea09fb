#include "tessera/base/detail/hash.h"
#include "tessera/base/error.h"
#include "tessera/redistribute/detail/execute.h"

#include <unordered_map>

namespace tessera::redistribute {
namespace {

// The plans of one mesh, in two generations. When the young generation is full, the old one is dropped. So memory is
// bounded, and a plan that was returned just now stays valid. A mesh belongs to one rank, so no lock is needed.
class PlanTable final : public tessera::detail::MeshAttachment {
 public:
  const Plan& find_or_make(const TensorSpec& from, const TensorSpec& to) {
    Key key{&from, &to};
    if (auto found = young_.find(key); found != young_.end()) return found->second->plan;
    if (young_.size() >= kMost) {
      old_ = std::move(young_);
      young_.clear();
    }
    auto node = old_.extract(key);
    if (node.empty()) {
      auto entry = std::make_unique<Entry>(
          Entry{SpecRef::reclaim_copy(&from), SpecRef::reclaim_copy(&to), make_plan(problem(from, to))});
      return young_.emplace(key, std::move(entry)).first->second->plan;
    }
    return young_.insert(std::move(node)).position->second->plan;
  }

  void clear() override {
    young_.clear();
    old_.clear();
  }

 private:
  static constexpr size_t kMost = 2048;
  using Key = std::pair<const TensorSpec*, const TensorSpec*>;
  struct Hash {
    size_t operator()(const Key& key) const { return hash_combine(hash_combine(0, key.first), key.second); }
  };
  struct Entry {
    SpecRef from, to;  // keep alive the specs whose addresses are the key
    Plan plan;
  };
  using Table = std::unordered_map<Key, std::unique_ptr<Entry>, Hash>;

  static Problem problem(const TensorSpec& from, const TensorSpec& to) {
    const auto& shape = from.mesh.shape();
    return {.mesh_shape = {shape.begin(), shape.end()},
            .sizes = from.sizes,
            .element_size = static_cast<int64_t>(c10::elementSize(from.dtype)),
            .from = from.placements,
            .to = to.placements};
  }

  Table young_, old_;
};

PlanTable& plans_of(const DeviceMesh& mesh) {
  auto& slot = mesh.state()->attachments[static_cast<size_t>(tessera::detail::MeshSlot::Plans)];
  if (C10_UNLIKELY(!slot)) slot = std::make_unique<PlanTable>();
  return static_cast<PlanTable&>(*slot);
}

}  // namespace

const Plan& plan_between(const TensorSpec& from, const TensorSpec& to) {
  static const Plan kNothing;
  if (&from == &to) return kNothing;
  TESSERA_CHECK(from.mesh.state() == to.mesh.state(), UsageError, "redistribute ", from.describe(), " -> ",
                to.describe(), ": both specs must be on the same mesh");
  TESSERA_CHECK(from.sizes == to.sizes && from.dtype == to.dtype, InternalError, "redistribute ", from.describe(),
                " -> ", to.describe(), ": redistribute cannot change sizes or dtype");
  return plans_of(from.mesh).find_or_make(from, to);
}

}  // namespace tessera::redistribute
