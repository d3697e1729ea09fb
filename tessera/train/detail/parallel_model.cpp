#include "tessera/train/detail/parallel_model.h"

#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/checkpoint_wrapper.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/tensor_parallel/parallelize_module.h"

#include <ATen/Context.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace tessera::train {
namespace {

MixedPrecisionPolicy precision_of(const TrainConfig& config) {
  if (config.training.precision == "fp32") return {};
  const auto dtype = config.training.precision == "bf16" ? at::kBFloat16 : at::kHalf;
  return {.param_dtype = dtype, .reduce_dtype = at::kFloat};  // the loss converts logits itself
}

}  // namespace

ParallelModel::ParallelModel(const TrainConfig& config, DeviceMesh mesh, Init init)
    : mesh_(std::move(mesh)), language_model_([&] {
        manual_seed(config.training.seed);
        return deferred_init([&] { return make_language_model(model_config(config.model)); });
      }()) {
  auto& root = module();
  if (has_axis("tp") && mesh_.size("tp") > 1)
    parallelize_module(root, mesh_["tp"], tensor_parallel_plan(config), {.src_data_rank = std::nullopt});
  const auto blocks = blocks_of(language_model_);
  if (config.training.activation_checkpoint)
    for (const auto& block : blocks) checkpoint_wrapper(*block);
  if (has_axis("fsdp")) {
    const auto axes = has_axis("dp") ? mesh_[std::vector<std::string>{"dp", "fsdp"}] : mesh_["fsdp"];
    const auto policy = precision_of(config);
    for (const auto& block : blocks) fully_shard(*block, {.mesh = axes, .mp_policy = policy});
    fsdp_module_ = fsdp_module(fully_shard(root, {.mesh = axes, .mp_policy = policy}));
  }
  if (init == Init::Deferred) return;
  // Dropout on plain tensors draws from LibTorch's generator, which starts with another seed in every process. Ranks
  // with different samples draw different masks.
  at::manual_seed(config.training.seed + static_cast<uint64_t>(data_rank()));
  materialize(root, c10::Device(config.training.device));
  if (has_axis("dp") && !has_axis("fsdp") && mesh_.size("dp") > 1) {
    ReplicateOptions options;
    options.device_mesh = mesh_["dp"];
    options.init_sync = false;  // all ranks initialize the same values; check_replicas() verifies it
    options.gradient_as_bucket_view = true;
    replicated_ = replicated(replicate(root, options));
  }
}

bool ParallelModel::has_axis(const std::string& name) const {
  const auto& names = mesh_.names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

template <class F>
void ParallelModel::for_each_data_axis(F f) const {
  for (const std::string axis : {"dp", "fsdp"})
    if (has_axis(axis) && mesh_.size(axis) > 1) f(axis);
}

int64_t ParallelModel::data_ranks() const {
  int64_t ranks = 1;
  for_each_data_axis([&](const std::string& axis) { ranks *= mesh_.size(axis); });
  return ranks;
}

int64_t ParallelModel::data_rank() const {
  int64_t rank = 0;
  for_each_data_axis([&](const std::string& axis) { rank = rank * mesh_.size(axis) + mesh_.get_local_rank(axis); });
  return rank;
}

void ParallelModel::sum_over_data(at::Tensor& values) const {
  for_each_data_axis([&](const std::string& axis) { mesh_.get_group(axis)->all_reduce(values, ReduceOp::Sum).wait(); });
}

at::Tensor ParallelModel::gather_over_data(const at::Tensor& value) const {
  auto all = at::zeros({data_ranks()}, value.options());
  all[data_rank()] = value;
  sum_over_data(all);
  return all;
}

void ParallelModel::set_gradient_sync(bool sync) {
  if (fsdp_module_) fsdp_module_->set_requires_gradient_sync(sync);
  if (replicated_) replicated_->set_requires_gradient_sync(sync);
}

int64_t ParallelModel::parameter_bytes() const {
  int64_t bytes = 0;
  for (const auto& p : module().parameters()) {
    const auto local = is_dtensor(p) ? DTensor(p.detach()).to_local() : p.detach();
    bytes += local.numel() * static_cast<int64_t>(local.element_size());
  }
  return bytes;
}

}  // namespace tessera::train
