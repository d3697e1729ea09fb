#pragma once
#include <string>
#include <vector>

namespace tessera::cli {

struct ChildResult {
  int exit_code = -1;  // 128 + signal for a child that was killed; 127 if it could not be started
  std::string out;     // its standard output; errors go where ours go, or nowhere if `quiet`
};

// Runs a program (looked up in PATH) with these arguments, no shell between, and waits for it.
ChildResult run_child(const std::vector<std::string>& command, bool quiet = false);

}  // namespace tessera::cli
