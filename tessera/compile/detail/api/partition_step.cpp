#include "tessera/compile/detail/api/partition_step.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

Tensors parameters_to_partition(const CallArguments& arguments) {
  auto parameters = arguments.modules[0]->parameters();
  for (auto* optimizer : arguments.optimizers)
    for (const auto& group : optimizer->groups())
      for (const auto& p : group)
        if (std::none_of(parameters.begin(), parameters.end(), [&](const auto& other) { return other.is_same(p); }))
          parameters.push_back(p);
  return parameters;
}

}  // namespace

void check_data_parallel_arguments(const DataParallel& mode, const CallArguments& arguments) {
  TESSERA_CHECK(arguments.modules.size() == 1, UsageError,
                "compile: with DataParallel a step must have exactly one module argument; found ",
                arguments.modules.size(), ". A lambda must not capture its model: pass it as an argument");
  TESSERA_CHECK(arguments.optimizers.size() <= 1, UsageError,
                "compile: with DataParallel a step must have at most one optimizer argument; found ",
                arguments.optimizers.size());
  const auto dim = mode.options().input_batch_dim;
  for (size_t i = 0; i < arguments.tensors.size(); i++) {
    const auto& t = arguments.tensors[i];
    TESSERA_CHECK(!t.defined() || t.dim() == 0 || t.dim() > dim, UsageError, "compile: argument ", i, " of shape ",
                  t.sizes(), " does not have dim ", dim, ", the input_batch_dim of DataParallel");
  }
}

void partition_parameters(const DataParallel& mode, const CallArguments& arguments) {
  const at::NoGradGuard no_grad;
  const auto mesh = mode.mesh();
  auto parameters = parameters_to_partition(arguments);
  for (const auto& p : parameters)
    TESSERA_CHECK(!is_dtensor(p), UsageError, "compile: with DataParallel the model must have plain parameters; found ",
                  DTensor(p), "; do not parallelize it before");
  for (auto& p : parameters) {
    const auto placement = mode.placement(p);
    std::vector<std::pair<OptimizerAccess*, StateDict>> states;
    for (auto* optimizer : arguments.optimizers) {
      auto state = optimizer->state(p);
      if (state.empty()) continue;
      StateDict distributed;
      for (const auto& row : optimizer->state_entries())
        if (const auto* value = state.find(row.name))
          distributed.insert(row.name, row.like_parameter ? distribute_tensor(*value, mesh, {placement}) : *value);
      states.emplace_back(optimizer, std::move(distributed));
    }
    auto gradient = std::exchange(p.mutable_grad(), {});
    distribute_in_place(p, mesh, {placement});
    if (gradient.defined()) p.mutable_grad() = distribute_tensor(gradient, mesh, {placement});
    for (auto& [optimizer, state] : states) optimizer->set_state(p, std::move(state));
  }
}

void UnshardedParameters::unshard(const DataParallel& mode, const CallArguments& arguments) {
  const at::NoGradGuard no_grad;
  const auto mesh = mode.mesh();
  for (auto& p : parameters_to_partition(arguments)) {
    UnshardedParameter each{p, p.detach(), 0};
    const auto placement = DTensor(p).placements()[0];
    p.set_data(DTensor(each.sharded).redistribute({Replicate()}).to_local());
    if (p.requires_grad())
      each.hook = p.register_hook([mesh, placement](const at::Tensor& gradient) -> at::Tensor {
        const at::NoGradGuard no_grad;
        return DTensor::from_local(gradient, mesh, {Partial(ReduceOp::Avg)}).redistribute({placement});
      });
    unsharded_.push_back(std::move(each));
  }
}

void UnshardedParameters::reshard() {
  for (auto& [parameter, sharded, hook] : unsharded_) {
    if (parameter.requires_grad()) parameter.remove_hook(hook);
    parameter.set_data(sharded);
  }
  unsharded_.clear();
}

UnshardedParameters::~UnshardedParameters() { reshard(); }

}  // namespace tessera::compiler
