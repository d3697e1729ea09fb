#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/fsdp_module.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/pipelining/schedule.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

namespace tessera::pipelining {
namespace {

// Whether the ranks of `group` have different parts of the parameter.
bool is_sharded_over(const at::Tensor& parameter, const comm::Group& group) {
  if (!is_dtensor(parameter)) return false;
  const DTensor distributed(parameter);
  const DeviceMesh mesh = distributed.device_mesh();
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis)
    if (mesh.get_group(axis)->ranks() == group->ranks() && distributed.placements()[axis].is_sharded()) return true;
  return false;
}

void reduce_over(const torch::nn::Module& module, const comm::Group& group) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> averaged;
  for (at::Tensor parameter : module.parameters()) {
    if (!parameter.requires_grad()) continue;
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameter);
    if (is_sharded_over(parameter, group)) {
      gradient.div_(group->size());
      continue;
    }
    if (is_dtensor(gradient) && is_dtensor(parameter))
      gradient = DTensor(gradient).redistribute(DTensor(parameter).placements());
    at::Tensor local = is_dtensor(gradient) ? DTensor(gradient).to_local() : gradient;
    TESSERA_CHECK(local.is_non_overlapping_and_dense(), UsageError,
                  "average_gradients: the gradient of a parameter of sizes ", parameter.sizes(), " has strides ",
                  local.strides(), ". Make the gradient contiguous in a hook of the parameter");
    averaged.push_back(local);
  }
  if (!averaged.empty()) group->all_reduce_coalesced(averaged, ReduceOp::Avg).wait();
}

}  // namespace

void average_gradients(PipelineStage& stage, const GroupRef& group) {
  const comm::Group ranks = group.group();
  if (ranks->size() == 1) return;
  stage.reduce_grad = [before = stage.reduce_grad, module = stage.module().shared_from_this(), ranks] {
    if (before) before();
    reduce_over(*module, ranks);
  };
}

void use_fully_shard(PipelineStage& stage) {
  fsdp_module(stage.module()).set_requires_gradient_sync(false);
  stage.reduce_grad = [before = stage.reduce_grad, module = stage.module().shared_from_this()] {
    if (before) before();
    FSDPModule fsdp = fsdp_module(*module);
    fsdp.set_requires_gradient_sync(true);
    // A backward that uses no parameter: it reduces the gradients that the microbatches left.
    const at::AutoGradMode enable(true);
    const std::vector<at::Tensor> parameters = module->parameters();
    const at::Tensor x =
        at::ones({1}, at::TensorOptions(parameters.empty() ? at::Device(at::kCPU) : parameters[0].device()))
            .requires_grad_();
    const Tensors y =
        tessera::detail::run_as_forward(*module, {x}, [](const Tensors& in) { return Tensors{in[0] * 1}; });
    y[0].backward();
    fsdp.set_requires_gradient_sync(false);
  };
}

}  // namespace tessera::pipelining
