#pragma once
#include "tessera/comm/communicator.h"

#include <functional>
#include <string>
#include <vector>

// Small texts that the ranks of a group exchange through the store. No collective is posted, so nothing is counted.
// All ranks must call these functions in the same order. Requires: the group has a store.
namespace tessera::comm {

// Returns if all ranks pass the same lines. Else all ranks throw the same UsageError. It names the first rank that
// differs from most ranks and shows the first line that differs, from both ranks.
// `what` names the caller in errors.
// Example:  require_same_on_all_ranks(group, "DistributedDataParallel", {"net1.weight Float[16, 10]", ...});
void require_same_on_all_ranks(const Group& group, const std::string& what, const std::vector<std::string>& lines);

// Returns the text of rank 0 on every rank.
std::string broadcast_text(const Group& group, const std::string& what, const std::string& text);

// Gathers text() of every rank on rank 0, calls decide(texts) there, and returns its result on every rank.
// `texts` is in rank order. If text() or decide() throws on any rank, all ranks throw one error that says which ranks
// failed: SystemError or InternalError if a rank threw it, else UsageError. If text() throws, decide() is not called.
// The store keeps only the last result.
// Example:
//   gather_decide_broadcast(group, "save", [&] { write(); return ""; }, [&](const auto&) { rename(); return ""; });
std::string gather_decide_broadcast(const Group& group, const std::string& what,
                                    const std::function<std::string()>& text,
                                    const std::function<std::string(const std::vector<std::string>&)>& decide);

}  // namespace tessera::comm
