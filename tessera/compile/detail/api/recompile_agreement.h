#pragma once
#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/program.h"

#include <string>

// Ranks that recompile must do so together. A cache hit does not communicate, so a rank that recompiles alone is found
// at the next collective of its peers.
namespace tessera::compiler {

// Before this rank recompiles. Publishes the reason in the store, and posts a barrier on every group of the program
// that ran last. If all ranks recompile, the barriers complete. If a peer runs its program instead, its next collective
// on the group meets this barrier, and both throw.   UsageError: a peer does not recompile.
void announce_recompile(const Program& last, const std::string& reason);

// After a run of `program` has thrown `error`: adds which peer recompiles and why. "": none does.
std::string recompiles_of_peers(const Program& program);

// CompileOptions::agree: true if any rank of the current world has `wanted`. Communicates.
bool any_rank(bool wanted);

}  // namespace tessera::compiler
