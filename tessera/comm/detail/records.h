#pragma once
#include "tessera/comm/work.h"

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <string>

// One record per collective, passed to the observers of this thread: CommDebugMode, metrics, reports.
namespace tessera::comm {

enum class CommKind : uint8_t {
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
const char* kind_name(CommKind kind, Family family);  // "all_reduce" or "allreduce_", as CommDebugMode lists them
bool is_counted(CommKind kind);                       // false for barrier, wait, send, recv
std::ostream& operator<<(std::ostream& out, CommKind kind);

struct Record {
  using Time = std::chrono::steady_clock::time_point;
  std::string group;
  uint64_t sequence = 0;  // number of the collective on the group, from 0
  CommKind kind = CommKind::Barrier;
  Family family = Family::C10d;
  int64_t bytes = 0;  // the larger of this rank's input and output: the size of the full tensor
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::string tensor_name;
  Time posted{};   // call
  Time started{};  // the backend has accepted it
  Time done{};     // wait() returned; only in on_done

  const char* name() const { return kind_name(kind, family); }
  bool counted() const { return is_counted(kind); }
};
std::ostream& operator<<(std::ostream& out, const Record& record);

struct Observer {
  virtual ~Observer() = default;
  virtual void on_post(const Record&) {}
  virtual void on_done(const Record&) {}  // in wait(), on the waiting thread
};

// RAII: `observer` is called for the collectives that this thread posts. Scopes nest; all observers are called.
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

bool observed();  // whether this thread has an observer; cheap, so check it before you build a Record
void notify_post(const Record& record);
void notify_done(const Record& record);

}  // namespace tessera::comm
