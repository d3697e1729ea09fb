#pragma once
#include "tessera/nn/detail/forward_state.h"
#include "tessera/nn/detail/op_log.h"
#include "tessera/nn/detail/selective.h"
#include "tessera/nn/saved_tensor_hooks.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera::detail {

// Selective activation checkpointing: the op outputs that the policy saves in one checkpointed call. Forward runs under
// CachingMode, recomputation under CachedMode (PyTorch: _CachingTorchDispatchMode and _CachedTorchDispatchMode).
class SelectiveCache {
 public:
  explicit SelectiveCache(KeepPolicy policy) : policy_(std::move(policy)) {}

  class CachingMode;
  class CachedMode;

 private:
  struct Outputs {
    std::vector<c10::IValue> values;       // one per return; placeholders for tensors and lists of tensors
    std::vector<VersionedTensor> tensors;  // all tensors, in order
    std::vector<size_t> list_sizes;        // of each list, in order
    std::optional<RngStates> rng_after;    // of a random op: the generator states after it
    std::optional<size_t> log_position;    // the number of ops in the log of forward at this call
    bool copied = false;                   // forward wrote to an output later, so this is a copy
  };
  // The calls of one op, in order.
  struct Calls {
    std::vector<std::shared_ptr<Outputs>> outputs;  // null: not saved, or already moved out
    bool any_saved = false;
  };
  static std::shared_ptr<Outputs> save(c10::ArrayRef<c10::IValue> returns);
  static void push(const Outputs& outputs, bool copies, torch::jit::Stack* stack);

  KeepPolicy policy_;
  std::unordered_map<c10::OperatorHandle, Calls> calls_;
};

// Saves the outputs of ops in forward. Some functions write to the output of a saved op: `matmul(x, w) += bias` writes
// to the output of aten::mm through an alias with another version counter. So the mode tracks the memory of saved
// tensors, and copies them before a write.
class SelectiveCache::CachingMode final : public OpMode {
 public:
  CachingMode(SelectiveCache& cache, const OpLog& log, const std::optional<RngStates>& rng)
      : cache_(cache), log_(log), rng_(rng) {}
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override;

 private:
  void copy_before_write(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args);
  void share_versions(c10::ArrayRef<c10::IValue> returns) const;

  SelectiveCache& cache_;
  const OpLog& log_;
  const std::optional<RngStates>& rng_;
  std::unordered_map<const void*, std::pair<std::shared_ptr<Outputs>, size_t>> by_memory_;
  bool inside_ = false;  // inside an op on distributed tensors; its ops on local tensors are not cached
};

// Replaces ops by their saved outputs in recomputation.
class SelectiveCache::CachedMode final : public OpMode {
 public:
  // `last`: no further recomputation is expected, so outputs are moved out of the cache. If there is one after all, it
  // runs the ops. `complete`: forward has ended, so a call that forward did not make is an error.
  CachedMode(SelectiveCache& cache, const OpLog& log, bool last, bool complete)
      : cache_(cache), log_(log), last_(last), complete_(complete) {}
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override;

 private:
  SelectiveCache& cache_;
  const OpLog& log_;
  bool last_, complete_;
  std::unordered_map<c10::OperatorHandle, size_t> calls_so_far_;
  bool inside_ = false;
};

}  // namespace tessera::detail
