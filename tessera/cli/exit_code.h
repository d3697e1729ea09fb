#pragma once
#include <exception>
#include <string>

namespace tessera::cli {

// The exit codes of `tessera` and `tessera-bench`, for all commands. docs/design/train.md has the same table for users.
enum class ExitCode : int {
  Success = 0,
  Failure = 1,  // it ran and failed: a rank failed, a connection was lost, the disk is full, --accuracy was not reached
  Usage = 2,    // wrong input: command line, config, data, or a plan that cannot run
  Internal = 70,  // internal error, please report; EX_SOFTWARE of sysexits.h
  // `tessera run` and `tessera train` with several ranks: the exit code of the first rank that failed.
  // 128 + signal: a signal ended the program, or the first rank that failed.
};

constexpr const char* kExitCodeHelp =
    "Exit codes: 0 success; 1 failure, as a lost rank or a full disk; 2 wrong input; 70 internal error, please report; "
    "128 + signal.\n"
    "tessera run and tessera train exit with the code of the first rank that failed.";

// UsageError and ShardingError: Usage. InternalError: Internal. Others: Failure.
ExitCode exit_code_of(const std::exception& error);
// One line without a backtrace. An internal error asks the user to report it, and keeps its backtrace.
std::string error_text(const std::exception& error);

}  // namespace tessera::cli
