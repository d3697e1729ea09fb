#pragma once
#include "tessera/launch/detail/rank_plan.h"
#include "tessera/launch/detail/signals.h"

#include <sys/types.h>

#include <string>
#include <vector>

namespace tessera::launch {

// A program to execute.
struct Command {
  std::string path;                    // of the executable file
  std::vector<std::string> arguments;  // argv, with the program's name first
};

// Searches PATH as a shell does. Throws UsageError if the file does not exist or is not executable.
Command find_command(const std::vector<std::string>& arguments);

// A running rank. It leads its own process group and is killed when the launcher ends.
// The caller reads and closes `out` and `err`. If `out` is -1, the rank writes to the launcher's standard output.
struct RankProcess {
  pid_t pid = -1;
  int out = -1, err = -1;
};

// Starts a rank with the launcher's environment plus the plan's variables, with the signal mask from before `signals`
// was created, and with only the standard file descriptors. Local rank 0 reads the launcher's standard input unless
// that is a terminal. The other ranks read /dev/null.
// Requires: called on the main thread, or one that lives as long. A rank dies with the thread that started it.
// Throws UsageError if the file cannot be executed.
RankProcess start_rank(const Command& command, const RankPlan& plan, const Signals& signals);

}  // namespace tessera::launch
