#pragma once
#include "tessera/comm/communicator.h"

#include <functional>
#include <string>
#include <vector>

namespace tessera::comm {

// Every rank of the group says what it is about to do, an item a line; returns if all said the same. Else all ranks
// throw the same UsageError, which names the first rank that differs and shows the first line that does, from both
// sides. Goes over the store, so nothing is posted, and counted, for it.
// Example:  agree(group, "DistributedDataParallel", {"net1.weight Float[16, 10]", "net1.bias Float[16]"});
void agree(const Group& group, const std::string& what, const std::vector<std::string>& lines);

// The same text on every rank: that of the group's first. Over the store, too.
std::string from_first(const Group& group, const std::string& what, const std::string& text);

// Every rank says a text, the group's first concludes from all of them, in rank order, and every rank is given what it
// came to. What either throws, on any rank, all ranks throw, as one UsageError that says whose it was; nothing is
// concluded if a rank could not say its part. Over the store, which keeps nothing of it but the last conclusion.
// Example:  decide(group, "save", [&] { write(); return ""; }, [&](const auto&) { rename(); return ""; });
std::string decide(const Group& group, const std::string& what, const std::function<std::string()>& say,
                   const std::function<std::string(const std::vector<std::string>&)>& conclude);

}  // namespace tessera::comm
