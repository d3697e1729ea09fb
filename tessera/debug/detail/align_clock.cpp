#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/debug/detail/step_profiler.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <limits>
#include <map>
#include <sstream>

namespace tessera::debug {
namespace {

constexpr int kRounds = 8;

// Equal for processes that read the same steady clock: one boot of one kernel, and one time namespace.
std::string clock_of_this_machine() {
  char names[64] = {};
  (void)!readlink("/proc/self/ns/time", names, sizeof names - 1);
  return read_text_file("/proc/sys/kernel/random/boot_id", "the boot id") + names;
}

std::string key_of(const comm::Communicator& group, int64_t leader, int round, const char* what) {
  return c10::str("clock/", group.name(), "/", group.sequence(), "/", leader, "/", round, "/", what);
}

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// The leader asks rank 0 for its time. That time is between the times of question and answer.
ClockOffset ask_rank_0(comm::Communicator& group, int64_t leader, const std::function<int64_t()>& now) {
  auto& store = *group.store();
  ClockOffset best{0, std::numeric_limits<int64_t>::max()};
  for (int round = 0; round < kRounds; round++) {
    const int64_t asked = now();
    store.set(key_of(group, leader, round, "ask"), bytes_of("?"));
    const auto answer = store.get(key_of(group, leader, round, "time"));
    const int64_t answered = now();
    const int64_t error = (answered - asked + 1) / 2;
    const int64_t time = std::stoll(std::string(answer.begin(), answer.end()));
    if (error < best.error) best = {time - (asked + (answered - asked) / 2), error};
  }
  return best;
}

void answer_leader(comm::Communicator& group, int64_t leader, const std::function<int64_t()>& now) {
  auto& store = *group.store();
  for (int round = 0; round < kRounds; round++) {
    store.get(key_of(group, leader, round, "ask"));
    store.set(key_of(group, leader, round, "time"), bytes_of(std::to_string(now())));
  }
}

}  // namespace

ClockOffset align_clock(const comm::Group& group, const std::string& machine, const std::function<int64_t()>& clock) {
  const auto now = clock ? clock : [] {
    return int64_t{
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count()};
  };
  const auto own = machine.empty() ? clock_of_this_machine() : machine;
  // The leader of each rank: the first rank of its machine.
  const auto leaders_text = comm::gather_decide_broadcast(
      group, "comparing clocks", [&] { return own; },
      [](const std::vector<std::string>& machines) {
        std::map<std::string, size_t> first;
        std::string leaders;
        for (size_t r = 0; r < machines.size(); r++)
          leaders += c10::str(first.emplace(machines[r], r).first->second, " ");
        return leaders;
      });
  std::vector<int64_t> leaders;
  std::istringstream numbers(leaders_text);
  for (int64_t leader = 0; numbers >> leader;) leaders.push_back(leader);
  const auto rank = group->rank();
  ClockOffset mine;
  for (int64_t leader = 1; leader < group->size(); leader++) {
    if (leaders[static_cast<size_t>(leader)] != leader) continue;
    if (rank == 0) answer_leader(*group, leader, now);
    if (rank == leader) {
      mine = ask_rank_0(*group, leader, now);
      group->store()->set(key_of(*group, leader, 0, "offset"), bytes_of(c10::str(mine.offset, " ", mine.error)));
    }
  }
  const auto leader = leaders[static_cast<size_t>(rank)];
  if (leader != 0 && leader != rank) {
    const auto text = group->store()->get(key_of(*group, leader, 0, "offset"));
    std::istringstream(std::string(text.begin(), text.end())) >> mine.offset >> mine.error;
  }
  return mine;
}

}  // namespace tessera::debug
