#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <string>

// Ranks that compile one function must all succeed, or all know that one has failed.
namespace tessera::compiler {

// One compilation of one function. Ranks that compile the same function together have equal values.
struct CompileAttempt {
  std::string function = {};  // identifies it; empty: failures are not published
  int64_t number = 0;
};

// After this rank could not compile: peers that wait for it in agree_on() throw, or fall back to eager too.
// `runs_eager`: it does not compile in later calls either, whatever the number of the attempt.
void publish_failure(const CompileAttempt& attempt, const std::string& reason, bool runs_eager);
// Before the next attempt.
void withdraw_failure(const CompileAttempt& attempt);

// Checks that all ranks of each group compiled the same sequence of collectives on it. Call it before the program posts
// its first collective. On a mismatch all ranks throw UsageError with the first line that differs.
// If a peer could not compile: UsageError with its rank and reason.
void agree_on(const Program& program, const CompileAttempt& attempt);

// False for a group of one rank, and for one that does not communicate.
bool has_peers(const comm::Group& group);
bool has_peers(const Program& program);

}  // namespace tessera::compiler
