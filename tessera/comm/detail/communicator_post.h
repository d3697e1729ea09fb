#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/posting.h"
#include "tessera/comm/detail/work_state.h"
#include "tessera/comm/detail/collective_label.h"
#include "tessera/comm/detail/watch/journal.h"
#include "tessera/comm/detail/watch/watched.h"

#include <ATen/record_function.h>

#include <atomic>
#include <functional>
#include <mutex>

// What the two files of the Communicator share: what aliases of a group have in common, and how a call is posted.
namespace tessera::comm {

// Posts for a collective that is no member of the Communicator.
using PostCall = std::function<c10::intrusive_ptr<c10d::Work>()>;
inline Work post_on(Communicator& group, Kind kind, PostOptions options, int64_t bytes, c10::ScalarType dtype,
                    const PostCall& call);

struct Communicator::Impl {
  struct Pending {
    c10::Storage storage;  // a result is found by its memory, so that a view of it can be waited for
    Work work;
  };
  std::string backend_name;
  std::atomic<uint64_t> sequence{0};
  std::atomic<size_t> pending_count{0};
  std::mutex mutex;
  std::vector<Pending> pending;  // oldest first
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  watch::Watched* watched = nullptr;  // the backend, if it is ours
  bool closed = false;

  static Work post(Communicator& group, Kind kind, Options options, int64_t bytes, c10::ScalarType dtype,
                   const PostCall& call) {
    return group.post(kind, options, bytes, dtype, call);
  }
  friend Work post_on(Communicator& group, Kind kind, PostOptions options, int64_t bytes, c10::ScalarType dtype,
                      const PostCall& call) {
    return post(group, kind, options, bytes, dtype, call);
  }
};

// Every collective goes through here: numbered, timed for observers, errors named. A group of one is done at once.
template <class Call>
Work Communicator::post(Kind kind, Options options, int64_t bytes, c10::ScalarType dtype, Call&& call) {
  const uint64_t sequence = impl_->sequence.fetch_add(1, std::memory_order_relaxed);
  const Label* label = Label::current();
  if (label && !*options.tensor_name) options.tensor_name = label->name();
  RECORD_FUNCTION(kind_name(kind, options.family), c10::ArrayRef<const c10::IValue>{});
  std::unique_ptr<Record> record;
  if (C10_UNLIKELY(observed())) {
    record = std::make_unique<Record>();
    *record = {name_, sequence, kind, options.family, bytes, dtype, options.tensor_name, {}, {}, {}};
    record->posted = std::chrono::steady_clock::now();
    notify_post(*record);
  }
  watch::Journal* journal = impl_->watched ? impl_->watched->journal.get() : nullptr;
  if (journal) journal->posted(kind, options.family, sequence, bytes, dtype, options.tensor_name);
  const detail::Posting posting{kind, options.family, sequence, options.tensor_name, label ? label->number() : 0};
  detail::posting = &posting;
  struct Reset {
    ~Reset() { detail::posting = nullptr; }
  } reset;
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
  state->journal = journal;
  return Work(std::move(state));
}

}  // namespace tessera::comm
