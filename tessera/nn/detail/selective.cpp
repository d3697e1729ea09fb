#include "tessera/nn/detail/selective.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/register.h"

#include <algorithm>
#include <unordered_set>

namespace tessera {
namespace {

std::string full_name(const c10::OperatorName& name) { return c10::toString(name); }

// Whether the op always runs as its decomposition. If Tessera has a kernel for distributed tensors, it does not.
bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse3);
}

}  // namespace

bool detail::makes_tensors(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto aliases = [](const c10::Argument& a) { return a.alias_info() != nullptr; };
  const auto& returns = schema.returns();
  return !schema.is_mutable() && !returns.empty() && std::none_of(returns.begin(), returns.end(), aliases);
}

KeepPolicy keep_ops(const std::vector<std::string>& names) {
  detail::register_kernels();  // is_composite() asks for them: the answer must not depend on whether a DTensor exists
  std::unordered_set<c10::OperatorHandle> kept;
  const auto all = c10::Dispatcher::singleton().getAllOpNames();
  for (const auto& name : names) {
    bool known = false, composite = false, found = false;
    for (const auto& each : all) {
      if (each.name != name && full_name(each) != name) continue;
      const auto op = c10::Dispatcher::singleton().findSchema(each);
      if (!op) continue;
      known = true;
      const bool op_is_composite = is_composite(*op);
      composite = composite || op_is_composite;
      if (op_is_composite || !detail::makes_tensors(*op)) continue;
      kept.insert(*op);
      found = true;
    }
    TESSERA_CHECK(known, UsageError, "keep_ops: unknown op '", name,
                  "'; write the name with its namespace, as in aten::mm, or with its overload, as in aten::add.Tensor");
    TESSERA_CHECK(found || !composite, UsageError, "keep_ops: ", name,
                  " is composite: only the ops of its decomposition run; name those (for aten::linear: aten::addmm, "
                  "aten::mm)");
    TESSERA_CHECK(found, UsageError, "keep_ops: ", name,
                  " returns or writes its arguments, so it has no output of its own to save");
  }
  return [kept = std::move(kept)](const c10::OperatorHandle& op) { return kept.contains(op); };
}

}  // namespace tessera
