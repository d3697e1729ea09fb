#pragma once
#include "tessera/launch/detail/rank_plan.h"
#include "tessera/launch/detail/signals.h"

#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera::launch {

struct Program {
  std::string path;                // of the file
  std::vector<std::string> words;  // its arguments, its own name first
};

// Looks the program up as a shell does. Throws UsageError if there is none, or none that can be executed.
Program find_program(const std::vector<std::string>& words);

// One running rank: leader of a process group of its own, which ends with us. `out` and `err` are ours to read and
// close; an `out` of -1 is none: the rank writes to our own.
struct RankProcess {
  pid_t pid = -1;
  int out = -1, err = -1;
};

// Starts it with our environment and the plan's variables, signals as they were before `signals`, and no descriptors
// but the standard ones. Rank 0 of the host reads our standard input unless that is a terminal; the others read
// nothing. Requires: called on the main thread, or one that lives as long: a rank dies with the thread that started it.
// Throws UsageError if the file cannot be executed after all.
RankProcess start_rank(const Program& program, const RankPlan& plan, const Signals& signals);

}  // namespace tessera::launch
