#pragma once
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/forward_state.h"
#include "tessera/nn/detail/op_log.h"
#include "tessera/nn/detail/selective_cache.h"
#include "tessera/nn/saved_tensor_hooks.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <c10/util/DimVector.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::detail {

// The metadata of a saved tensor that must be equal in forward and recomputation.
struct SavedMeta {
  explicit SavedMeta(const at::Tensor& t);
  bool operator==(const SavedMeta& other) const;
  std::string describe() const;

 private:
  c10::DimVector sizes_;
  c10::ScalarType dtype_;
  c10::Device device_;
  SpecRef spec_;  // of a distributed tensor; interned, so equal specs are equal pointers
};

// One call of a checkpointed function (PyTorch: _CheckpointFrame). In forward, each tensor that autograd saves gets an
// empty slot:
//
//   forward       autograd saves tensors 0, 1, 2     slots_ has weak pointers to   Slot  Slot  Slot
//                                                    the graph owns the Slots, and each Slot owns this frame
//   backward 7    needs tensor 2: runs the function again, and stores its saved tensors 0, 1, 2 in the slots under id 7
//                 unpacking a tensor removes it from its Slot; the graph node destroys the Slot
//
// So the frame exists as long as the graph needs it, and a partial backward stores only tensors that are still needed.
class CheckpointFrame : public std::enable_shared_from_this<CheckpointFrame> {
 public:
  using RecomputeFn = std::function<void(Tensors)>;
  CheckpointFrame(const CheckpointOptions& options, const Tensors& inputs, RecomputeFn recompute_fn);

  Unpack pack(const at::Tensor& t);  // in forward
  void forward_ended();

 private:
  friend class CheckpointForward;
  using Backward = int64_t;  // the graph task id of a backward

  struct Slot {
    std::vector<std::pair<Backward, VersionedTensor>> values;
    std::optional<VersionedTensor> take(Backward backward);
  };
  struct Saved {
    SavedMeta meta;
    OpLocation location;
  };
  struct Recomputation;

  at::Tensor unpack(Slot& slot);
  void recompute(Backward backward);
  void run_again(Recomputation& run);
  Unpack pack_again(Recomputation& run, const at::Tensor& t);
  std::optional<std::string> difference(Recomputation& run, size_t index, const at::Tensor& t);
  void drop(Backward backward);
  Tensors inputs() const;

  CheckpointOptions options_;
  RecomputeFn recompute_fn_;
  ForwardState state_;
  std::vector<torch::autograd::SavedVariable> inputs_;  // saved variables, so an outer checkpoint recomputes them
  std::vector<PackerRef> filtering_packers_;            // the packers of forward that accept only some tensors
  std::vector<std::weak_ptr<Slot>> slots_;
  std::vector<Saved> saved_;  // one per slot; empty without determinism_check
  OpLog op_log_;
  std::optional<SelectiveCache> cache_;
  bool complete_ = false;       // forward has ended
  std::recursive_mutex mutex_;  // several device threads of the autograd engine may unpack
};

}  // namespace tessera::detail
