#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

struct ChildResult {
  int exit_code = -1;  // 128 + signal if a signal killed the child; 127 if it did not start
  std::string out;     // its standard output
  bool timed_out = false;
};

// Where the child's standard error goes: to this process's standard error, to /dev/null, or into ChildResult::out.
enum class ChildErrors : uint8_t { Shown, Dropped, InOutput };

// Runs a program (found in PATH) with these arguments, without a shell, and waits for it.
// `limit`: after this time the child is killed, with all processes that it has started; 0: no limit.
ChildResult run_child(const std::vector<std::string>& command, ChildErrors errors = ChildErrors::Shown,
                      std::chrono::milliseconds limit = {});

}  // namespace tessera
