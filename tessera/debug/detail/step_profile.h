#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// What one rank does in a training step: ops, collectives and memory, with times. `tessera report` shows it.
namespace tessera::debug {

// All times are nanoseconds since StepProfile::start.
struct ProfiledOp {
  int64_t name = 0;    // index in StepProfile::names
  int64_t thread = 0;  // 0: the thread of the step; backward on a GPU has another
  int64_t start = 0, duration = 0;
  bool operator==(const ProfiledOp&) const = default;
};

struct ProfiledCollective {
  std::string kind, group;  // "all_reduce", "dp"
  int64_t sequence = 0;     // on its group
  int64_t bytes = 0;        // as comm::Record counts them
  // The rank is blocked from `posted` to `started` and from `waited` to `done`. In between it computes.
  int64_t posted = 0, started = 0, waited = 0, done = 0;

  int64_t in_flight() const { return done - posted; }
  int64_t exposed() const { return (started - posted) + (done - waited); }
  bool operator==(const ProfiledCollective&) const = default;
};

struct StepProfile {
  int64_t rank = 0, step = 0;
  int64_t start = 0;        // on the clock of rank 0, in nanoseconds
  int64_t duration = 0;     // of the step
  int64_t clock_error = 0;  // bound of the error of `start`; 0 on the host of rank 0
  std::vector<std::string> names;
  std::vector<ProfiledOp> ops;  // by start; an op that calls another has started before it
  std::vector<ProfiledCollective> collectives;
  std::vector<std::pair<int64_t, int64_t>> memory;  // time, bytes that tensors got since the start less those freed
  int64_t dropped = 0;                              // ops beyond kMaxProfiledOps
  bool operator==(const StepProfile&) const = default;
};
constexpr size_t kMaxProfiledOps = 200'000;

// One line of JSON, and back. parse_step_profile() throws UsageError with `what` for other text.
std::string to_json(const StepProfile& profile);
StepProfile parse_step_profile(const std::string& text, const std::string& what);

// The profiles of all ranks as a trace for Perfetto and chrome://tracing: a process per rank with a row of ops, a row
// of collectives in flight and the memory.
std::string chrome_trace(const std::vector<StepProfile>& ranks);

struct OpTime {
  std::string name;
  int64_t calls = 0, self = 0;  // self: without the ops that it calls; nanoseconds
  bool operator==(const OpTime&) const = default;
};
// Ops by name, the longest first. Collectives are not among them.
std::vector<OpTime> time_by_op(const StepProfile& profile);

struct CollectiveTime {
  std::string kind, group;
  int64_t calls = 0, bytes = 0, in_flight = 0, exposed = 0;
  bool operator==(const CollectiveTime&) const = default;
};
// Collectives by kind and group, the longest exposed time first.
std::vector<CollectiveTime> time_by_collective(const StepProfile& profile);

// An interval of the step of one kind.
struct ProfileInterval {
  enum class Kind : uint8_t { Op, Exposed } kind;
  int64_t start, end;
  bool operator==(const ProfileInterval&) const = default;
};
// What the thread of the step does, without overlaps, in order: ops, or blocked in communication; in the gaps it runs
// other code. Intervals of one kind with a gap of less than `resolution` are one.
std::vector<ProfileInterval> timeline(const StepProfile& profile, int64_t resolution);

}  // namespace tessera::debug
