#pragma once
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/propagate/detail/key.h"
#include "tessera/propagate/detail/op_entry.h"

#include <ATen/core/ivalue.h>

#include <optional>
#include <utility>
#include <vector>

namespace tessera::propagate {

// How a call is run: the placements of its inputs and outputs, and its local op. It is cached under the call's key.
struct Decision {
  // Strategies: the rule's strategies, or the placements of a view, apply.
  // Decompose: `special` runs on the distributed tensors, or the op's composite kernel.
  // Functional: `special` is the functional form of an op that writes arguments. It runs on the distributed tensors,
  // and its results are copied into these arguments. Replicated: all inputs are redistributed to Replicate, and the op
  // runs on the local tensors. The sizes of its results come from the local results.
  enum class Kind : uint8_t { Strategies, Decompose, Functional, Replicated };

  uint64_t hash = 0;
  c10::SmallVector<uint64_t, 16> key;
  std::vector<SpecRef> pinned;  // keeps the specs alive whose addresses are in `key`

  Kind kind = Kind::Strategies;
  // No input is redistributed, no argument is replaced, and each result is wrapped. Typed kernels have a fast path.
  bool simple = true;
  bool redistributes = false;
  std::vector<SpecRef> want;  // per tensor argument (list elements one by one); null: unchanged

  // Results. Sizes, strides and placements are known now; dtype and device after the first run.
  struct Out {
    Sizes sizes, strides;
    Placements placements;
    SpecRef spec;  // null until the first run
  };
  c10::SmallVector<Out, 2> outs;

  std::vector<std::pair<int, c10::IValue>> fixes;  // arguments with the values of this rank's shard
  std::optional<c10::OperatorHandle> special;      // runs instead of the op, with special_args added
  std::vector<c10::IValue> special_args;

  // The view that the first run made of the local tensor. Later runs make it without a call of the op.
  struct ViewShape {
    Sizes in_sizes, in_strides;  // of that local tensor; for another geometry the op is called again
    Sizes sizes, strides;
    int64_t offset = 0;
  };
  std::optional<ViewShape> view;
};

// The decisions of one rank on one mesh. It has no lock, because a rank uses its mesh from one thread at a time.
// It is cleared when it has kMost entries, and after a new rule is registered.
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
