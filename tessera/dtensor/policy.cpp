#include "tessera/dtensor/policy.h"

#include "tessera/base/error.h"

namespace tessera {
namespace {
// A CPU backward runs in the thread that called it, so a thread-local reaches it.
thread_local CommPolicy policy_now = CommPolicy::Allow;
thread_local int implicit_replication_depth = 0;
}  // namespace

CommPolicyScope::CommPolicyScope(CommPolicy policy) : before_(policy_now) { policy_now = policy; }
CommPolicyScope::~CommPolicyScope() { policy_now = before_; }
CommPolicy comm_policy() { return policy_now; }

ImplicitReplication::ImplicitReplication() { implicit_replication_depth++; }
ImplicitReplication::~ImplicitReplication() { implicit_replication_depth--; }

namespace detail {

bool implicit_replication() { return implicit_replication_depth > 0; }

void check_policy(const std::string& what) {
  if (policy_now == CommPolicy::Allow) return;
  const auto message = c10::str(what,
                                " Nobody asked for this communication. Write redistribute(...) where it should "
                                "happen, or allow it: CommPolicyScope(CommPolicy::Allow).");
  TESSERA_CHECK(policy_now != CommPolicy::Error, ShardingError, message);
  TORCH_WARN(message);
}

}  // namespace detail
}  // namespace tessera
