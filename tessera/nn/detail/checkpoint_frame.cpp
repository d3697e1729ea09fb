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

constexpr const char* kMustBeSame =
    " The function must do the same when it is run again: no branch on what changed in between, no random number from "
    "elsewhere, no tensor that was replaced.";

class Recomputing {
 public:
  Recomputing() { recomputations++; }
  ~Recomputing() { recomputations--; }
};

int64_t this_backward() {
  const int64_t id = torch::autograd::get_current_graph_task_id();
  static std::atomic<int64_t> outside{-2};
  return id == -1 ? outside-- : id;  // someone looks at saved tensors without a backward
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

// A run of the function inside of backward number `backward`.
struct CheckpointFrame::Run {
  Backward backward;
  size_t needed;  // one past the last slot that is still wanted
  OpLog trail;
  size_t saved = 0;
  std::optional<std::string> error;
};

namespace {
// Ends a run from inside the function. Of no std::exception, so that the function does not catch it by accident.
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

CheckpointFrame::CheckpointFrame(const CheckpointOptions& options, const Tensors& inputs, Again again)
    : options_(options), again_(std::move(again)), state_(inputs, options.preserve_rng_state) {
  for (const auto& packer : packers())
    if (packer->claims == Accepts::SomeTensors) filtering_packers_.push_back(packer);
  inputs_.reserve(inputs.size());
  for (const auto& t : inputs) inputs_.emplace_back(t, /*is_output=*/false);
  if (options.keep) kept_.emplace(options.keep);
}

Tensors CheckpointFrame::inputs() const {
  Tensors tensors;
  for (const auto& input : inputs_) tensors.push_back(input.unpack());
  return tensors;
}

Unpack CheckpointFrame::pack(const at::Tensor& t) {
  auto slot = std::make_shared<Slot>();
  slots_.push_back(slot);
  if (options_.determinism_check) saved_.push_back({SavedMeta(t), op_log_.here()});
  return [frame = shared_from_this(), slot = std::move(slot)] { return frame->unpack(*slot); };
}

at::Tensor CheckpointFrame::unpack(Slot& slot) {
  const std::lock_guard lock(mutex_);
  const auto backward = this_backward();
  auto value = slot.take(backward);
  if (!value) {  // the first of this backward, or a second time the same one
    recompute(backward);
    value = slot.take(backward);
  }
  TESSERA_CHECK(value, InternalError, "checkpoint: recomputation did not reach a tensor that backward needs");
  return value->get();
}

void CheckpointFrame::recompute(Backward backward) {
  drop(backward);
  Run run{backward, slots_.size(), OpLog(&op_log_), 0, {}};
  while (run.needed > 0 && slots_[run.needed - 1].expired()) run.needed--;
  try {
    run_again(run);
  } catch (...) {
    drop(backward);
    throw;
  }
  if (run.error) drop(backward);
  TESSERA_CHECK(!run.error, UsageError, "checkpoint: ", *run.error, ".", kMustBeSame);
}

void CheckpointFrame::run_again(Run& run) {
  auto tensors = inputs();  // before anything else: an outer checkpoint may have to compute them
  const Recomputing recomputing;
  const ForwardState::Scope state(state_);
  const ForwardInBackward forward;
  const at::AutoGradMode with_gradients(true);
  auto packers = filtering_packers_;  // and nothing else that is on: as if this were the only checkpoint
  packers.push_back(
      std::make_shared<const Packer>(Packer{Accepts::AllTensors, [&](const at::Tensor& t) { return pack_again(run, t); }}));
  const OnlyPackers only(std::move(packers));
  std::optional<SelectiveCache::CachedMode> handing_out;
  std::optional<OpModeScope> selective;
  if (kept_) {
    handing_out.emplace(*kept_, run.trail, /*last=*/!torch::autograd::get_current_graph_task_keep_graph(), complete_);
    selective.emplace(*handing_out);
  }
  const OpLogScope following(options_.determinism_check ? &run.trail : nullptr);
  try {
    again_(std::move(tensors));
  } catch (const StopRecomputation& stop) {
    if (stop.run != &run) throw;
    return;
  }
  if (run.error) return;
  if (options_.determinism_check && run.trail.difference()) {
    run.error = run.trail.difference();
  } else if (run.saved < slots_.size()) {
    run.error = c10::str("forward saved ", slots_.size(), " tensors for backward, recomputation only ", run.saved);
    if (!saved_.empty()) {
      const auto& missing = saved_[run.saved];
      *run.error +=
          c10::str("; the next one was ", missing.meta.describe(), ", saved by ", op_log_.describe(missing.place));
    }
  }
}

Unpack CheckpointFrame::pack_again(Run& run, const at::Tensor& t) {
  const size_t index = run.saved++;
  VersionedTensor kept(t);
  // The graph that recomputation builds holds its tensors itself: the function may run a backward of its own.
  const auto done = [&] { return [kept] { return kept.get(); }; };
  // Forward is not over: it has called a backward itself, and we are past the point where.
  if (index >= slots_.size() && !complete_) return done();
  run.error = difference(run, index, t);
  if (run.error) throw StopRecomputation{&run};
  if (const auto slot = slots_[index].lock()) slot->values.emplace_back(run.backward, kept);
  if (options_.early_stop && index + 1 >= run.needed) throw StopRecomputation{&run};
  return done();
}

std::optional<std::string> CheckpointFrame::difference(Run& run, size_t index, const at::Tensor& t) {
  const SavedMeta meta(t);
  if (index >= slots_.size())
    return c10::str("forward saved ", slots_.size(), " tensors for backward, recomputation also saves ",
                    meta.describe(), options_.determinism_check ? " by " + run.trail.describe(run.trail.here()) : "");
  if (!options_.determinism_check) return std::nullopt;
  if (run.trail.difference()) return run.trail.difference();
  const auto& before = saved_[index];
  const auto place = run.trail.here();
  const bool same_op = before.place.op == place.op || !op_log_.complete() || !run.trail.complete();
  if (before.meta == meta && same_op) return std::nullopt;
  return c10::str("tensor ", index, " of the ", slots_.size(), " saved for backward was ", before.meta.describe(),
                  ", saved by ", op_log_.describe(before.place), " in forward, and is ", meta.describe(), ", saved by ",
                  run.trail.describe(place), " in recomputation");
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
        following(frame->options_.determinism_check ? &frame->op_log_ : nullptr) {
    if (!frame->kept_) return;
    keeping.emplace(*frame->kept_, frame->op_log_, frame->state_.random());
    selective.emplace(*keeping);
  }
  std::shared_ptr<CheckpointFrame> frame;
  SavedTensorHooks scope;
  std::optional<SelectiveCache::CachingMode> keeping;
  std::optional<OpModeScope> selective;
  OpLogScope following;
  int exceptions = std::uncaught_exceptions();
};

CheckpointForward::CheckpointForward(const CheckpointOptions& options, const Tensors& inputs,
                                     std::function<void(Tensors)> again)
    : guards_(std::make_unique<Guards>(std::make_shared<CheckpointFrame>(options, inputs, std::move(again)))) {}

CheckpointForward::~CheckpointForward() {
  if (std::uncaught_exceptions() == guards_->exceptions) guards_->frame->forward_ended();
}

}  // namespace detail
}  // namespace tessera
