#include "tessera/compile/detail/trace/call_arguments.h"

#include "tessera/base/error.h"

#include <unordered_map>

namespace tessera::compiler {

void CallArguments::refuse_torch_optimizer() {
  TESSERA_FAIL(UsageError,
               "compile: an optimizer of torch::optim counts its steps on the host, and the count would become a "
               "constant of the program; use the optimizer of the same name in tessera::optim");
}

std::vector<Lifted> lift(const CallArguments& arguments) {
  std::vector<Lifted> lifted;
  std::unordered_map<const void*, std::string> names;  // of the tensors lifted so far
  const auto add = [&](const at::Tensor& t, Role role, const std::string& name) {
    if (t.defined() && names.emplace(t.unsafeGetTensorImpl(), name).second) lifted.push_back({t, role, name});
  };
  for (size_t m = 0; m < arguments.modules.size(); m++) {
    const auto prefix = arguments.modules.size() == 1 ? "" : c10::str(m, ".");
    for (const auto& item : arguments.modules[m]->named_parameters())
      add(item.value(), Role::Parameter, prefix + item.key());
    for (const auto& item : arguments.modules[m]->named_buffers()) add(item.value(), Role::Buffer, prefix + item.key());
  }
  for (const auto& leaf : arguments.leaves) add(leaf, Role::Parameter, c10::str("leaf ", names.size()));
  std::vector<at::Tensor> parameters;
  for (auto* optimizer : arguments.optimizers)
    for (const auto& group : optimizer->groups())
      for (const auto& p : group) add(p, Role::Parameter, c10::str("parameter ", names.size()));
  for (const auto& each : lifted)
    if (each.role == Role::Parameter) parameters.push_back(each.tensor);
  for (auto* optimizer : arguments.optimizers)
    for (const auto& group : optimizer->groups())
      for (const auto& p : group)
        for (const auto& [key, value] : optimizer->state(p))
          add(value, Role::State, names[p.unsafeGetTensorImpl()] + "." + key);
  for (const auto& p : parameters)
    if (p.grad().defined()) add(p.grad(), Role::Gradient, names[p.unsafeGetTensorImpl()]);
  for (size_t i = 0; i < arguments.tensors.size(); i++)
    if (!arguments.tensors[i].defined() || !names.count(arguments.tensors[i].unsafeGetTensorImpl()))
      lifted.push_back({arguments.tensors[i], Role::Argument, std::to_string(i)});
  return lifted;
}

}  // namespace tessera::compiler
