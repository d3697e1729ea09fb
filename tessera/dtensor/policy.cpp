#include "tessera/dtensor/policy.h"

#include "tessera/base/error.h"

namespace tessera {
namespace {
// Thread-local is enough for backward: a CPU backward runs on the thread that called it.
thread_local CommPolicy current_policy = CommPolicy::Allow;
thread_local int implicit_replication_depth = 0;
}  // namespace

CommPolicyScope::CommPolicyScope(CommPolicy policy) : before_(current_policy) { current_policy = policy; }
CommPolicyScope::~CommPolicyScope() { current_policy = before_; }
CommPolicy comm_policy() { return current_policy; }

ImplicitReplication::ImplicitReplication() { implicit_replication_depth++; }
ImplicitReplication::~ImplicitReplication() { implicit_replication_depth--; }

namespace detail {

bool implicit_replication() { return implicit_replication_depth > 0; }

void check_policy(const std::string& what) {
  if (current_policy == CommPolicy::Allow) return;
  const auto message = c10::str(what,
                                " The code does not request this communication. Write redistribute(...) where it "
                                "should happen, or allow it: CommPolicyScope(CommPolicy::Allow).");
  TESSERA_CHECK(current_policy != CommPolicy::Error, ShardingError, message);
  TORCH_WARN(message);
}

}  // namespace detail
}  // namespace tessera
