#pragma once
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/forward_state.h"
#include "tessera/nn/detail/selective_cache.h"
#include "tessera/nn/detail/op_log.h"
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

// What must be the same about a tensor that is saved in forward and again in recomputation.
struct SavedMeta {
  explicit SavedMeta(const at::Tensor& t);
  bool operator==(const SavedMeta& other) const;
  std::string describe() const;

 private:
  c10::DimVector sizes_;
  c10::ScalarType dtype_;
  c10::Device device_;
  SpecRef spec_;  // of a distributed tensor: interned, so equal specs are one
};

// One call of a checkpointed function. In forward every tensor that autograd saves gets a slot here, and nothing is
// kept in it:
//
//   forward       saved tensor 0, 1, 2        slots_   (weak)  (weak)  (weak)
//                 the graph holds                      Slot    Slot    Slot       and each Slot holds this frame
//   backward 7    needs 2: runs the function again; what is saved then, 0, 1, 2, goes into the slots under number 7
//                 a Slot gives its tensor away as it is unpacked, and dies with the graph's node
//
// So the frame lives as long as some part of the graph needs it, and a partial backward keeps no more than what is
// still wanted.
class CheckpointFrame : public std::enable_shared_from_this<CheckpointFrame> {
 public:
  using Again = std::function<void(Tensors)>;
  CheckpointFrame(const CheckpointOptions& options, const Tensors& inputs, Again again);

  Unpack pack(const at::Tensor& t);  // in forward
  void forward_ended();

 private:
  friend class CheckpointForward;
  using Backward = int64_t;  // the number of a run of backward

  struct Slot {
    std::vector<std::pair<Backward, VersionedTensor>> values;
    std::optional<VersionedTensor> take(Backward backward);
  };
  struct Saved {
    SavedMeta meta;
    Place place;
  };
  struct Run;

  at::Tensor unpack(Slot& slot);
  void recompute(Backward backward);
  void run_again(Run& run);
  Unpack pack_again(Run& run, const at::Tensor& t);
  std::optional<std::string> difference(Run& run, size_t index, const at::Tensor& t);
  void drop(Backward backward);
  Tensors inputs() const;

  CheckpointOptions options_;
  Again again_;
  ForwardState state_;
  std::vector<torch::autograd::SavedVariable> inputs_;  // so that an outer checkpoint computes them again
  std::vector<PackerRef> filtering_packers_;                     // on in forward
  std::vector<std::weak_ptr<Slot>> slots_;
  std::vector<Saved> saved_;  // one a slot; empty without determinism_check
  OpLog op_log_;
  std::optional<SelectiveCache> kept_;
  bool complete_ = false;
  std::recursive_mutex mutex_;  // device threads of autograd may both need something
};

}  // namespace tessera::detail
