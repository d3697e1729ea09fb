#include "tessera/nn/detail/checkpoint_frame.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/dtensor/detail/meta.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>

namespace tessera {
namespace {
thread_local constinit int recomputations = 0;
}  // namespace

bool recomputing() { return recomputations > 0; }

namespace detail {
namespace {

constexpr const char* kMustRunSameOps =
    " The function must run the same ops in recomputation. It must not branch on state that changes after forward, use "
    "random numbers of other generators, or read tensors that are replaced.";

class RecomputingScope {
 public:
  RecomputingScope() { recomputations++; }
  ~RecomputingScope() { recomputations--; }
};

int64_t this_backward() {
  const int64_t id = torch::autograd::get_current_graph_task_id();
  static std::atomic<int64_t> outside{-2};
  return id == -1 ? outside-- : id;  // code reads saved tensors outside of a backward
}

}  // namespace

SavedMeta::SavedMeta(const at::Tensor& t) : dtype_(t.scalar_type()), device_(t.device()) {
  if (const auto* spec = spec_or_null(t))
    spec_ = SpecRef::reclaim_copy(spec);
  else if (!t.is_nested())
    sizes_ = t.sizes();
}
bool SavedMeta::operator==(const SavedMeta& other) const {
  return spec_ == other.spec_ && sizes_ == other.sizes_ && dtype_ == other.dtype_ && device_ == other.device_;
}
std::string SavedMeta::describe() const {
  if (spec_) return spec_->describe();
  return c10::str(dtype_, c10::IntArrayRef(sizes_), " on ", device_);
}

// One recomputation of the function, inside of `backward`.
struct CheckpointFrame::Recomputation {
  Backward backward;
  size_t needed;  // one past the last slot that is still needed
  OpLog op_log;
  size_t saved = 0;
  std::optional<std::string> error;
};

namespace {
// Ends a recomputation early (PyTorch: _StopRecomputationError). It does not derive from std::exception, so that the
// function does not catch it by accident.
struct StopRecomputation {
  const void* run;
};
}  // namespace

std::optional<VersionedTensor> CheckpointFrame::Slot::take(Backward backward) {
  for (auto it = values.begin(); it != values.end(); ++it) {
    if (it->first != backward) continue;
    auto value = std::move(it->second);
    values.erase(it);
    return value;
  }
  return std::nullopt;
}

CheckpointFrame::CheckpointFrame(const CheckpointOptions& options, const Tensors& inputs, RecomputeFn recompute_fn)
    : options_(options), recompute_fn_(std::move(recompute_fn)), state_(inputs, options.preserve_rng_state) {
  for (const auto& packer : packers())
    if (packer->accepts == Accepts::SomeTensors) filtering_packers_.push_back(packer);
  inputs_.reserve(inputs.size());
  for (const auto& t : inputs) inputs_.emplace_back(t, /*is_output=*/false);
  if (options.keep) cache_.emplace(options.keep);
}

Tensors CheckpointFrame::inputs() const {
  Tensors tensors;
  for (const auto& input : inputs_) tensors.push_back(input.unpack());
  return tensors;
}

Unpack CheckpointFrame::pack(const at::Tensor& t) {
  auto slot = std::make_shared<Slot>();
  slots_.push_back(slot);
  if (options_.determinism_check) saved_.push_back({SavedMeta(t), op_log_.current_location()});
  return [frame = shared_from_this(), slot = std::move(slot)] { return frame->unpack(*slot); };
}

at::Tensor CheckpointFrame::unpack(Slot& slot) {
  const std::lock_guard lock(mutex_);
  const auto backward = this_backward();
  auto value = slot.take(backward);
  if (!value) {  // the first tensor of this backward, or the second use of a tensor
    recompute(backward);
    value = slot.take(backward);
  }
  TESSERA_CHECK(value, InternalError, "checkpoint: recomputation did not reach a tensor that backward needs");
  return value->get();
}

void CheckpointFrame::recompute(Backward backward) {
  drop(backward);
  Recomputation run{backward, slots_.size(), OpLog(&op_log_), 0, {}};
  while (run.needed > 0 && slots_[run.needed - 1].expired()) run.needed--;
  try {
    run_again(run);
  } catch (...) {
    drop(backward);
    throw;
  }
  if (run.error) drop(backward);
  TESSERA_CHECK(!run.error, UsageError, "checkpoint: ", *run.error, ".", kMustRunSameOps);
}

void CheckpointFrame::run_again(Recomputation& run) {
  auto tensors = inputs();  // first of all: an outer checkpoint may have to recompute them
  const RecomputingScope recomputing;
  const ForwardState::Scope state(state_);
  const RecomputeScope forward;
  const at::AutoGradMode with_gradients(true);
  auto packers = filtering_packers_;  // other active packers must not see the tensors of this recomputation
  packers.push_back(std::make_shared<const Packer>(
      Packer{Accepts::AllTensors, [&](const at::Tensor& t) { return pack_again(run, t); }}));
  const OnlyPackers only(std::move(packers));
  std::optional<SelectiveCache::CachedMode> cached_mode;
  std::optional<OpModeScope> mode_scope;
  if (cache_) {
    cached_mode.emplace(*cache_, run.op_log, /*last=*/!torch::autograd::get_current_graph_task_keep_graph(), complete_);
    mode_scope.emplace(*cached_mode);
  }
  const OpLogScope logging(options_.determinism_check ? &run.op_log : nullptr);
  try {
    recompute_fn_(std::move(tensors));
  } catch (const StopRecomputation& stop) {
    if (stop.run != &run) throw;
    return;
  }
  if (run.error) return;
  if (options_.determinism_check && run.op_log.difference()) {
    run.error = run.op_log.difference();
  } else if (run.saved < slots_.size()) {
    run.error = c10::str("forward saved ", slots_.size(), " tensors for backward, recomputation only ", run.saved);
    if (!saved_.empty()) {
      const auto& missing = saved_[run.saved];
      *run.error +=
          c10::str("; the next one was ", missing.meta.describe(), ", saved by ", op_log_.describe(missing.location));
    }
  }
}

Unpack CheckpointFrame::pack_again(Recomputation& run, const at::Tensor& t) {
  const size_t index = run.saved++;
  VersionedTensor saved(t);
  // The graph that recomputation builds saves its tensors itself: the function may call backward.
  const auto done = [&] { return [saved] { return saved.get(); }; };
  // Forward has not ended: it called backward itself, and recomputation has passed that call.
  if (index >= slots_.size() && !complete_) return done();
  run.error = difference(run, index, t);
  if (run.error) throw StopRecomputation{&run};
  if (const auto slot = slots_[index].lock()) slot->values.emplace_back(run.backward, saved);
  if (options_.early_stop && index + 1 >= run.needed) throw StopRecomputation{&run};
  return done();
}

std::optional<std::string> CheckpointFrame::difference(Recomputation& run, size_t index, const at::Tensor& t) {
  const SavedMeta meta(t);
  auto& log = run.op_log;
  if (index >= slots_.size())
    return c10::str("forward saved ", slots_.size(), " tensors for backward, recomputation also saves ",
                    meta.describe(), options_.determinism_check ? " by " + log.describe(log.current_location()) : "");
  if (!options_.determinism_check) return std::nullopt;
  if (log.difference()) return log.difference();
  const auto& before = saved_[index];
  const auto location = log.current_location();
  const bool same_op = before.location.op == location.op || !op_log_.complete() || !log.complete();
  if (before.meta == meta && same_op) return std::nullopt;
  return c10::str("tensor ", index, " of the ", slots_.size(), " saved for backward was ", before.meta.describe(),
                  ", saved by ", op_log_.describe(before.location), " in forward, and is ", meta.describe(),
                  ", saved by ", log.describe(location), " in recomputation");
}

void CheckpointFrame::drop(Backward backward) {
  for (const auto& weak : slots_)
    if (const auto slot = weak.lock()) slot->take(backward);
}

void CheckpointFrame::forward_ended() {
  complete_ = true;
  op_log_.end();
  state_.drop_unused_generators();
}

// ---- forward ----

struct CheckpointForward::Guards {
  explicit Guards(std::shared_ptr<CheckpointFrame> f)
      : frame(std::move(f)),
        scope(Packer{Accepts::AllTensors, [frame = frame.get()](const at::Tensor& t) { return frame->pack(t); }}),
        logging(frame->options_.determinism_check ? &frame->op_log_ : nullptr) {
    if (!frame->cache_) return;
    caching_mode.emplace(*frame->cache_, frame->op_log_, frame->state_.rng());
    mode_scope.emplace(*caching_mode);
  }
  std::shared_ptr<CheckpointFrame> frame;
  SavedTensorHooks scope;
  std::optional<SelectiveCache::CachingMode> caching_mode;
  std::optional<OpModeScope> mode_scope;
  OpLogScope logging;
  int exceptions = std::uncaught_exceptions();
};

CheckpointForward::CheckpointForward(const CheckpointOptions& options, const Tensors& inputs,
                                     std::function<void(Tensors)> recompute)
    : guards_(std::make_unique<Guards>(std::make_shared<CheckpointFrame>(options, inputs, std::move(recompute)))) {}

CheckpointForward::~CheckpointForward() {
  if (std::uncaught_exceptions() == guards_->exceptions) guards_->frame->forward_ended();
}

}  // namespace detail
}  // namespace tessera
