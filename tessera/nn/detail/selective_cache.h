#pragma once
#include "tessera/tracing/op_mode.h"
#include "tessera/nn/detail/forward_state.h"
#include "tessera/nn/detail/op_log.h"
#include "tessera/nn/saved_tensor_hooks.h"
#include "tessera/nn/detail/selective.h"

#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace tessera::detail {

// The results that a KeepPolicy keeps of one checkpointed call, and the two modes that put them in and take them out.
class SelectiveCache {
 public:
  explicit SelectiveCache(KeepPolicy policy) : policy_(std::move(policy)) {}

  // Sees the ops of forward.
  class CachingMode;
  // Sees the ops of a recomputation.
  class CachedMode;

 private:
  struct Result {
    std::vector<c10::IValue> values;     // one a return; tensors and lists of them are below
    std::vector<VersionedTensor> tensors;     // all of them, in order
    std::vector<size_t> list_sizes;      // of each list, in order
    std::optional<RngStates> after;  // of an op that draws random numbers: where the streams stood then
    std::optional<size_t> step;          // how far forward was by its trail
    bool copied = false;                 // because forward went on to write to what the op returned
  };
  // The calls of one op, in order.
  struct Calls {
    std::vector<std::shared_ptr<Result>> results;  // null: not kept, or handed out for good
    bool any_kept = false;
  };
  static std::shared_ptr<Result> take(c10::ArrayRef<c10::IValue> returns);
  static void give(const Result& result, bool copies, torch::jit::Stack* stack);

  KeepPolicy policy_;
  std::unordered_map<c10::OperatorHandle, Calls> calls_;
};

// Some functions write to what a kept op returned: `matmul(x, w) += bias` to the result of aten::mm, through an alias
// that does not share its version. So the mode knows the memory of what was kept, and copies before it is written to.
class SelectiveCache::CachingMode final : public OpMode {
 public:
  CachingMode(SelectiveCache& kept, const OpLog& trail, const std::optional<RngStates>& streams)
      : kept_(kept), op_log_(trail), streams_(streams) {}
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override;

 private:
  void copy_what_is_written(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args);
  void share_versions(c10::ArrayRef<c10::IValue> returns) const;

  SelectiveCache& kept_;
  const OpLog& op_log_;
  const std::optional<RngStates>& streams_;
  std::unordered_map<const void*, std::pair<std::shared_ptr<Result>, size_t>> by_memory_;
  bool inside_ = false;  // of an op on distributed tensors: what it does to pieces is not looked at
};

class SelectiveCache::CachedMode final : public OpMode {
 public:
  // `last`: no other recomputation will come, so results go as they are handed out. Should one come after all, it runs
  // the ops. `complete`: forward has ended, so an op that it did not call is an error.
  CachedMode(SelectiveCache& kept, const OpLog& trail, bool last, bool complete)
      : kept_(kept), op_log_(trail), last_(last), complete_(complete) {}
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override;

 private:
  SelectiveCache& kept_;
  const OpLog& op_log_;
  bool last_, complete_;
  std::unordered_map<c10::OperatorHandle, size_t> calls_so_far_;
  bool inside_ = false;
};

}  // namespace tessera::detail
