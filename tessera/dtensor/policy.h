#pragma once
#include <cstdint>
#include <string>

namespace tessera {

// What happens when an op has to communicate although nobody asked for it in so many words. Explicit, and always
// allowed: redistribute, from_local, to_local, full_tensor, the hooks of parallel styles, DDP and FSDP, and the
// backward of these. All else is implicit: a Partial gradient at the optimizer and item() on a Partial included.
enum class CommPolicy : uint8_t { Allow, Warn, Error };

// Holds on this thread, and in a backward started from it, while alive.
class CommPolicyScope {
 public:
  explicit CommPolicyScope(CommPolicy policy);
  ~CommPolicyScope();
  CommPolicyScope(const CommPolicyScope&) = delete;

 private:
  CommPolicy before_;
};

CommPolicy comm_policy();

// Plain tensors of any size next to distributed ones count as Replicate while alive. Without it only plain tensors of
// one element may be mixed in.
class ImplicitReplication {
 public:
  ImplicitReplication();
  ~ImplicitReplication();
  ImplicitReplication(const ImplicitReplication&) = delete;
};

namespace detail {
bool implicit_replication();
// Called before an implicit redistribution that communicates. Throws ShardingError under Error, warns under Warn.
void check_policy(const std::string& what);
}  // namespace detail
}  // namespace tessera
