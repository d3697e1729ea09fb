#pragma once
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/propagate/detail/key.h"
#include "tessera/propagate/detail/op_entry.h"

#include <ATen/core/ivalue.h>

#include <optional>
#include <utility>
#include <vector>

namespace tessera::propagate {

// What to do with a call, for as long as its key stays the same.
struct Decision {
  // No row to follow: the op is made of others (Decompose: `special` on the distributed tensors, or the op's composite
  // kernel), or every input is whole everywhere and the op may run as it stands (Replicated).
  enum class Kind : uint8_t { Strategies, Decompose, Replicated };

  uint64_t hash = 0;
  c10::SmallVector<uint64_t, 16> key;
  std::vector<SpecRef> pinned;  // the specs whose addresses are in `key`, so that no other spec can take their place

  Kind kind = Kind::Strategies;
  // Nothing to redistribute, no argument to change, results wrapped one by one: typed kernels run straight through.
  bool simple = true;
  bool redistributes = false;
  std::vector<SpecRef> want;  // per tensor argument (list elements one by one); null: as it is

  // Results: geometry and placements are known now, dtype and device after the first run.
  struct Out {
    Sizes sizes, strides;
    Placements placements;
    SpecRef spec;  // null until learned
  };
  c10::SmallVector<Out, 2> outs;

  std::vector<std::pair<int, c10::IValue>> fixes;  // static arguments as this rank's piece needs them
  std::optional<c10::OperatorHandle> special;      // runs instead of the op, with these arguments added
  std::vector<c10::IValue> special_args;

  // A view of the local, once seen, is made again without calling the op.
  struct ViewShape {
    Sizes in_sizes, in_strides;  // of the local it was seen on; another local calls the op again
    Sizes sizes, strides;
    int64_t offset = 0;
  };
  std::optional<ViewShape> view;
};

// Decisions of one rank on one mesh. Found without a lock: a rank uses its mesh from one thread at a time.
// Bounded: at kMost it starts afresh, and so it does when rules were registered since.
class DecisionCache final : public detail::MeshAttachment {
 public:
  static constexpr size_t kMost = 1 << 15;

  Decision* find(const OpEntry& entry, const Key& key, uint64_t hash);
  Decision& insert(const OpEntry& entry, std::unique_ptr<Decision> decision);
  void clear() override;

  size_t size() const { return size_; }
  uint64_t hits() const { return hits_; }
  uint64_t misses() const { return misses_; }

 private:
  struct Table {
    std::vector<std::unique_ptr<Decision>> slots;  // open addressing, a power of two, at most half full
    size_t used = 0;
  };
  std::vector<Table> tables_;  // by OpEntry::id
  size_t size_ = 0;
  uint64_t hits_ = 0, misses_ = 0;
  uint64_t rules_version_ = 0;
};

DecisionCache& decision_cache(detail::MeshState& mesh);

}  // namespace tessera::propagate
