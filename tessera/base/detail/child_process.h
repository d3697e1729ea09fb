#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

struct ChildResult {
  int exit_code = -1;  // 128 + signal for a child that was killed; 127 if it could not be started
  std::string out;     // its standard output
};

// Where a child's standard error goes: where ours goes, nowhere, or into ChildResult::out.
enum class ChildErrors : uint8_t { Shown, Dropped, InOutput };

// Runs a program (looked up in PATH) with these arguments, no shell between, and waits for it.
ChildResult run_child(const std::vector<std::string>& command, ChildErrors errors = ChildErrors::Shown);

}  // namespace tessera
