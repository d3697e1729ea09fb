#pragma once
#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/program.h"

#include <string>

// Ranks must run their programs together. A cache hit does not communicate, so a rank that recompiles alone, or stops
// with an error of its own, is found at the next collective of its peers.
namespace tessera::compiler {

// What a rank does instead of running its program.
enum class Announcement : uint8_t {
  Recompiles,
  Stops,  // an error of its own ends the call
};

// Publishes the reason in the store, and posts a barrier on every group of the program that ran last. If all ranks do
// the same, the barriers complete. If a peer runs its program instead, its next collective on the group meets this
// barrier, and both throw.   UsageError: a peer runs its program.
void announce(Announcement announcement, const Program& last, const std::string& reason);

// After a run of `program` has thrown: which peer did not run it, and why. "": all did.
std::string announcements_of_peers(const Program& program);

// CompileOptions::agree: the largest value of all ranks of the current world. Communicates.
int64_t largest_of_ranks(int64_t value);

// A key for the compiled functions of one type: all ranks create their functions in the same order.
std::string function_key(const char* type);

// The message of an error, without a backtrace.
std::string message_of(const std::exception& error);

// Did communication fail, so that peers know of it already?
bool is_communication_error(const std::exception& error);

}  // namespace tessera::compiler
