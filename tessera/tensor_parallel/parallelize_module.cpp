#include "tessera/tensor_parallel/parallelize_module.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/detail/hookable.h"
#include "tessera/nn/detail/replicated_over.h"
#include "tessera/nn/module_tree.h"
#include "tessera/tensor_parallel/detail/module_plan.h"
#include "tessera/tensor_parallel/detail/plain_dropout.h"
#include "tessera/tensor_parallel/detail/style_hooks.h"

#include <ATen/core/grad_mode.h>

namespace tessera {
namespace {

using torch::nn::Module;

void distribute(Module& module, const DeviceMesh& mesh, const ModulePlan& plan, std::optional<int64_t> source) {
  auto parameters = module.named_parameters(/*recurse=*/false);
  for (const auto& p : plan.parameters) {
    auto& parameter = parameters[p.name];
    distribute_in_place(parameter, mesh, {p.placement}, {p.communicates ? source : std::nullopt});
    detail::meta_of(parameter).accepts_plain = !plan.hooked;
  }
}

// Ranks with different plans would start different collectives and wait for each other forever.
void check_agreement(const DeviceMesh& mesh, const std::vector<ModulePlan>& plans) {
  if (!mesh.get_coordinate()) return;
  std::vector<std::string> lines;
  for (const auto& plan : plans) {
    lines.push_back(c10::str(plan.path, " ", plan.kind, " ", plan.style));
    for (const auto& p : plan.parameters)
      lines.push_back(c10::str(plan.path, ".", p.name, " ", c10::IntArrayRef(p.sizes), " ", p.placement));
  }
  comm::require_same_on_all_ranks(mesh.get_group(), "parallelize_module", lines);
}

}  // namespace

Module& parallelize_module(Module& module, const DeviceMesh& mesh, const Plan& plan,
                           const ParallelizeOptions& options) {
  if (plan.empty()) return parallelize_module(module, mesh, std::nullopt, options);
  const auto plans = resolve_plan(module, mesh, plan, options.unmatched);
  const auto dropouts = unplanned_dropouts(module, plans);
  check_agreement(mesh, plans);
  at::NoGradGuard no_grad;
  for (const auto& module_plan : plans) {
    const auto target =
        module_plan.hooked ? hookable(module, module_plan.path) : get_submodule(module, module_plan.path);
    distribute(*target, mesh, module_plan, options.src_data_rank);
    if (module_plan.hooked) attach_style_hooks(*target, mesh, module_plan);
  }
  for (const auto& path : dropouts) attach_dropout_hooks(*hookable(module, path), mesh);
  install_plain_dropout();
  set_replicated_over(module, mesh);
  return module;
}

Module& parallelize_module(Module& module, const DeviceMesh&, std::nullopt_t, const ParallelizeOptions&) {
  TORCH_WARN("parallelize_module: the plan for ", class_name(module), " is empty; the module is unchanged");
  return module;
}

Module& parallelize_module(Module& module, const Plan& plan, const ParallelizeOptions& options) {
  return parallelize_module(module, DeviceMesh::current(), plan, options);
}

}  // namespace tessera
