#pragma once
#include <cstdint>
#include <string>

// What is allowed without a request in the code: communication inside an op, and plain tensors next to DTensors.
namespace tessera {

// What happens when an op needs other placements and has to communicate for it. Explicit communication is always
// allowed: redistribute, from_local, to_local, full_tensor, the hooks of parallel styles, DDP and FSDP, and the
// backward of these. All other communication is implicit, for example a Partial gradient at the optimizer, or item() on
// a Partial.
enum class CommPolicy : uint8_t {
  Allow,  // communicate silently
  Warn,   // communicate, and print a warning
  Error,  // throw ShardingError
};

// Sets the policy while alive, for this thread and for a backward that it starts.
class CommPolicyScope {
 public:
  explicit CommPolicyScope(CommPolicy policy);  // replaces the policy of this thread
  ~CommPolicyScope();
  CommPolicyScope(const CommPolicyScope&) = delete;

 private:
  CommPolicy before_;
};

// The policy of this thread. The default is Allow.
CommPolicy comm_policy();

// While alive, ops treat plain tensors next to DTensors as Replicate (PyTorch: implicit_replication). Without it only
// plain tensors of one element are accepted.
class ImplicitReplication {
 public:
  ImplicitReplication();  // opens the scope on this thread
  ~ImplicitReplication();
  ImplicitReplication(const ImplicitReplication&) = delete;
};

namespace detail {
// True inside an ImplicitReplication scope.
bool implicit_replication();
// Called before an implicit redistribution that communicates. Throws ShardingError under Error, warns under Warn.
void check_policy(const std::string& what);
}  // namespace detail
}  // namespace tessera
