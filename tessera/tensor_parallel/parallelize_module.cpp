#include "tessera/tensor_parallel/parallelize_module.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/detail/hookable.h"
#include "tessera/nn/module_tree.h"
#include "tessera/tensor_parallel/detail/module_plan.h"
#include "tessera/tensor_parallel/detail/style_hooks.h"

#include <ATen/core/grad_mode.h>

namespace tessera {
namespace {

using torch::nn::Module;

void distribute(Module& module, const DeviceMesh& mesh, const ModulePlan& work, std::optional<int64_t> source) {
  auto parameters = module.named_parameters(/*recurse=*/false);
  for (const auto& p : work.parameters) {
    auto& parameter = parameters[p.name];
    distribute_in_place(parameter, mesh, {p.placement}, {p.communicates ? source : std::nullopt});
    detail::meta_of(parameter).takes_plain = !work.hooked;
  }
}

// Ranks with different plans would distribute different parameters, each waiting for the others.
void check_agreement(const DeviceMesh& mesh, const std::vector<ModulePlan>& works) {
  if (!mesh.get_coordinate()) return;
  std::vector<std::string> lines;
  for (const auto& work : works) {
    lines.push_back(c10::str(work.path, " ", work.kind, " ", work.style));
    for (const auto& p : work.parameters)
      lines.push_back(c10::str(work.path, ".", p.name, " ", c10::IntArrayRef(p.sizes), " ", p.placement));
  }
  comm::agree(mesh.get_group(), "parallelize_module", lines);
}

}  // namespace

void parallelize_module(Module& module, const DeviceMesh& mesh, const Plan& plan, const ParallelizeOptions& options) {
  if (plan.empty()) return parallelize_module(module, mesh, std::nullopt, options);
  const auto works = resolve_plan(module, mesh, plan, options.unmatched);
  const auto dropouts = unplanned_dropouts(module, works);
  check_agreement(mesh, works);
  at::NoGradGuard no_grad;
  for (const auto& work : works) {
    const auto target = work.hooked ? hookable(module, work.path) : get_submodule(module, work.path);
    distribute(*target, mesh, work, options.src_data_rank);
    if (work.hooked) attach_style_hooks(*target, mesh, work);
  }
  for (const auto& path : dropouts) attach_dropout_hooks(*hookable(module, path), mesh);
}

void parallelize_module(Module& module, const DeviceMesh&, std::nullopt_t, const ParallelizeOptions&) {
  TORCH_WARN("parallelize_module: no plan for ", class_name(module), ", which stays as it is");
}

void parallelize_module(Module& module, const Plan& plan, const ParallelizeOptions& options) {
  parallelize_module(module, DeviceMesh::current(), plan, options);
}

}  // namespace tessera
