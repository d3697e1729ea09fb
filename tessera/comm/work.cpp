#include "tessera/comm/work.h"

#include "tessera/comm/detail/watch/last_collective_recorder.h"
#include "tessera/comm/detail/work_state.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

namespace tessera::comm {

std::string describe(const Communicator& group, CommKind kind, Family family, uint64_t sequence,
                     const char* tensor_name) {
  std::string named = *tensor_name ? c10::str(" ('", tensor_name, "')") : std::string();
  return c10::str("rank ", group.ranks()[static_cast<size_t>(group.rank())], ", ", kind_name(kind, family), " #",
                  sequence, named, " on group '", group.name(), "' (ranks ", c10::Join(",", group.ranks()), ")");
}

void Work::wait() {
  if (!state_ || state_->finished) return;
  State& s = *state_;
  RECORD_FUNCTION("tessera::wait", c10::ArrayRef<const c10::IValue>{});
  if (s.recorder) s.recorder->set_waiting(true);
  named_errors(*s.group, s.kind, s.family, s.sequence, s.tensor_name, [&] { return s.transfer->wait(); });
  if (s.recorder) s.recorder->set_waiting(false);
  s.finished = true;
  s.transfer.reset();  // releases the tensors
  if (auto finish = std::exchange(s.finish, nullptr)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    finish();
  }
  if (s.record) {
    s.record->done = std::chrono::steady_clock::now();
    notify_done(*s.record);
  }
}

Work& Work::then(std::function<void()> more) {
  if (!state_ || state_->finished) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    more();
  } else if (!state_->finish) {
    state_->finish = std::move(more);
  } else {
    state_->finish = [first = std::move(state_->finish), second = std::move(more)] {
      first();
      second();
    };
  }
  return *this;
}

bool Work::done() const { return !state_ || state_->finished || state_->transfer->isCompleted(); }

}  // namespace tessera::comm
