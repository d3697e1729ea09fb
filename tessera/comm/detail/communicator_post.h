#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/collective_label.h"
#include "tessera/comm/detail/current_collective.h"
#include "tessera/comm/detail/watch/last_collective_recorder.h"
#include "tessera/comm/detail/watch/monitored_backend.h"
#include "tessera/comm/detail/work_state.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/record_function.h>

#include <atomic>
#include <functional>
#include <mutex>

// Shared by the files of Communicator: the state that aliases of a group share, and how a collective is posted.
namespace tessera::comm {

using Tensors = std::vector<at::Tensor>;

// Posts a collective that is not a member function of Communicator.
using PostCall = std::function<c10::intrusive_ptr<c10d::Work>()>;
inline Work post_on(Communicator& group, CommKind kind, PostOptions options, int64_t bytes, c10::ScalarType dtype,
                    const PostCall& call);

struct Communicator::Impl {
  struct Pending {
    c10::Storage storage;  // results are found by storage, so that wait() works on a view
    Work work;
  };
  std::string backend_name;
  std::atomic<uint64_t> sequence{0};  // of collectives, which all ranks post in one order
  std::atomic<uint64_t> messages{0};  // of sends and receives, which only two ranks have in common
  std::atomic<size_t> pending_count{0};
  std::mutex mutex;
  std::vector<Pending> pending;  // oldest first
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  watch::MonitoredBackend* monitored = nullptr;  // the backend, if it is one
  bool closed = false;

  static Work post(Communicator& group, CommKind kind, Options options, int64_t bytes, c10::ScalarType dtype,
                   const PostCall& call) {
    return group.post(kind, options, bytes, dtype, call);
  }
  friend Work post_on(Communicator& group, CommKind kind, PostOptions options, int64_t bytes, c10::ScalarType dtype,
                      const PostCall& call) {
    return post(group, kind, options, bytes, dtype, call);
  }
};

// Posts a collective: numbers it, notifies observers, adds context to errors. In a group of one it completes at once.
template <class Call>
Work Communicator::post(CommKind kind, Options options, int64_t bytes, c10::ScalarType dtype, Call&& call) {
  const bool message = kind == CommKind::Send || kind == CommKind::Recv;
  const uint64_t sequence = (message ? impl_->messages : impl_->sequence).fetch_add(1, std::memory_order_relaxed);
  const CollectiveLabel* label = CollectiveLabel::current();
  if (label && !*options.tensor_name) options.tensor_name = label->name();
  RECORD_FUNCTION(kind_name(kind, options.family), c10::ArrayRef<const c10::IValue>{});
  std::unique_ptr<Record> record;
  if (C10_UNLIKELY(observed())) {
    record = std::make_unique<Record>();
    *record = {name_, sequence, kind, options.family, bytes, dtype, options.tensor_name, {}, {}, {}};
    record->posted = std::chrono::steady_clock::now();
    notify_post(*record);
  }
  watch::LastCollectiveRecorder* recorder = impl_->monitored ? impl_->monitored->recorder.get() : nullptr;
  if (recorder) recorder->posted(kind, options.family, sequence, bytes, dtype, options.tensor_name);
  const detail::CurrentCollective current{kind, options.family, sequence, options.tensor_name,
                                          label ? label->number() : 0};
  detail::current_collective = &current;
  struct Reset {
    ~Reset() { detail::current_collective = nullptr; }
  } reset;
  const OpModesOff no_modes;  // threads of a backend run with the state of this thread
  auto transfer = named_errors(*this, kind, options.family, sequence, options.tensor_name, call);
  if (record) record->started = std::chrono::steady_clock::now();
  if (size() == 1) {
    if (transfer) transfer->wait();
    if (record) {
      record->done = std::chrono::steady_clock::now();
      notify_done(*record);
    }
    return Work();
  }
  auto state = std::make_shared<Work::State>();
  state->group = Group::unsafe_reclaim_from_nonowning(this);
  state->sequence = sequence;
  state->kind = kind;
  state->family = options.family;
  state->tensor_name = options.tensor_name;
  state->transfer = std::move(transfer);
  state->record = std::move(record);
  state->recorder = recorder;
  return Work(std::move(state));
}

}  // namespace tessera::comm
