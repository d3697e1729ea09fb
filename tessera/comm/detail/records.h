#pragma once
#include "tessera/comm/work.h"

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <string>

// One record per collective, handed to whoever observes this thread: CommDebugMode, the ledger, reports.
namespace tessera::comm {

enum class Kind : uint8_t {
  AllReduce,
  AllReduceCoalesced,
  AllGatherIntoTensor,
  AllGather,
  AllGatherCoalesced,
  ReduceScatterTensor,
  ReduceScatter,
  ReduceScatterCoalesced,
  Broadcast,
  Scatter,
  Gather,
  Reduce,
  AllToAllSingle,
  AllToAll,
  Send,
  Recv,
  Barrier,
  Wait,
  Count
};
const char* kind_name(Kind kind, Family family);  // "all_reduce" or "allreduce_", as CommDebugMode lists them
bool is_counted(Kind kind);                       // false for barrier, wait, send, recv
std::ostream& operator<<(std::ostream& out, Kind kind);

struct Record {
  using Time = std::chrono::steady_clock::time_point;
  std::string group;
  uint64_t sequence = 0;  // counts the collectives of this rank on the group, from 0
  Kind kind = Kind::Barrier;
  Family family = Family::C10d;
  int64_t bytes = 0;  // the larger of what this rank gives and gets: the tensor as it is when whole
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::string tensor_name;
  Time posted{};   // the call
  Time started{};  // the backend had accepted it
  Time done{};     // wait() returned; only in on_done

  const char* name() const { return kind_name(kind, family); }
  bool counted() const { return is_counted(kind); }
};
std::ostream& operator<<(std::ostream& out, const Record& record);

struct Observer {
  virtual ~Observer() = default;
  virtual void on_post(const Record&) {}
  virtual void on_done(const Record&) {}  // by those who observe when it is waited for
};

// While alive, `observer` sees the collectives that this thread posts. Scopes nest; all of them see each collective.
class ObserverScope {
 public:
  explicit ObserverScope(Observer* observer);
  ~ObserverScope();
  ObserverScope(const ObserverScope&) = delete;

 private:
  friend void notify_post(const Record&);
  friend void notify_done(const Record&);
  friend bool observed();
  static thread_local ObserverScope* innermost;
  Observer* observer_;
  ObserverScope* outer_;
};

bool observed();  // somebody observes this thread: a thread-local pointer, so ask before building a Record
void notify_post(const Record& record);
void notify_done(const Record& record);

}  // namespace tessera::comm
