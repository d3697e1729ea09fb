#include "tessera/train/detail/parallel_model.h"

#include "tessera/compile/api/options.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/checkpoint_wrapper.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/optim/detail/local_tensors.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/train/detail/pipeline_shape.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace tessera::train {
namespace {

const std::vector<std::string> kRowAxes = {"dp", "fsdp"}, kTokenAxes = {"dp", "fsdp", "cp"};

MixedPrecisionPolicy precision_of(const TrainConfig& config) {
  if (config.training.precision == "fp32") return {};
  const auto dtype = config.training.precision == "bf16" ? at::kBFloat16 : at::kHalf;
  return {.param_dtype = dtype, .reduce_dtype = at::kFloat};  // the loss converts logits itself
}

// The mesh of experts: ep has consecutive ranks of the product of dp, fsdp and cp. Ranks of edp have the same experts.
//   mesh dp=2,cp=2,tp=2 and ep=2:  ranks of dp x cp with tp 0 are 0 2 4 6;  ep is {0 2} {4 6},  edp is {0 4} {2 6}
DeviceMesh make_expert_mesh(const DeviceMesh& mesh, int64_t ep) {
  auto ranks = mesh.mesh();
  std::vector<int64_t> order, data;
  for (int64_t axis = 0; axis < mesh.ndim(); axis++) {
    const bool has_tokens = std::ranges::find(kTokenAxes, mesh.names()[axis]) != kTokenAxes.end();
    (has_tokens ? data : order).push_back(axis);
  }
  int64_t replicas = 1;
  for (const int64_t axis : data) replicas *= mesh.shape()[axis];
  order.insert(order.end(), data.begin(), data.end());
  ranks = ranks.permute(order).reshape({-1, replicas / ep, ep}).contiguous();
  return {mesh.device_type(), ranks, {"model", "edp", "ep"}};
}

std::vector<pipelining::PipelineLayers> split_stages(const LanguageModel& model, int64_t stages) {
  return std::visit(
      [&](const auto& holder) { return pipelining::split_evenly(models::pipeline_layers(holder), stages); }, model);
}

bool uses(const pipelining::PipelineLayers& layers, const std::shared_ptr<torch::nn::Module>& module) {
  return std::ranges::any_of(layers, [&](const pipelining::PipelineLayer& layer) {
    return std::ranges::find(layer.modules, module) != layer.modules.end();
  });
}

bool contains(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::ranges::any_of(tensors, [&](const at::Tensor& each) { return each.is_same(tensor); });
}

}  // namespace

ContextParallelOptions context_options(const ParallelOptions& options) {
  return {.method = options.context_method == "ulysses" ? ContextMethod::Ulysses : ContextMethod::Ring,
          .rotate = options.context_rotate == "alltoall" ? RotateMethod::AllToAll : RotateMethod::AllGather,
          .check_ops = false};  // the models of the trainer call scaled_dot_product_attention
}

ParallelModel::ParallelModel(const TrainConfig& config, DeviceMesh mesh, Init init)
    : mesh_(std::move(mesh)),
      language_model_([&] {
        manual_seed(config.training.seed);
        return deferred_init([&] { return make_language_model(model_config(config.model)); });
      }()),
      context_options_(context_options(config.parallel)) {
  auto& root = module();
  if (const int64_t ep = expert_ranks(config.parallel); ep > 1) {
    expert_mesh_ = make_expert_mesh(mesh_, ep);
    models::expert_parallel(std::get<models::Llama>(language_model_), expert_mesh_["ep"]);
  }
  if (has_axis("tp") && mesh_.size("tp") > 1)
    parallelize_module(root, mesh_["tp"], tensor_parallel_plan(config), {.src_data_rank = std::nullopt});
  if (config.training.activation_checkpoint)
    for (const auto& block : blocks_of(language_model_)) checkpoint_wrapper(*block);
  if (has_axis("pp") && mesh_.size("pp") > 1) build_stages_of(config);
  if (has_axis("fsdp")) shard_over_fsdp(config);
  // replicate() overlaps the all-reduce with backward. It averages over one axis, and experts too.
  const bool replicates = !has_stages() && !expert_mesh_ && !has_axis("cp");
  if (has_axis("dp") && !has_axis("fsdp") && mesh_.size("dp") > 1 && !replicates) reduced_axes_.emplace_back("dp");
  if (has_axis("cp") && mesh_.size("cp") > 1) reduced_axes_.emplace_back("cp");
  for (auto& stage : stages_)
    stage.reduce_grad = [this, before = stage.reduce_grad, module = stage.module().shared_from_this()] {
      if (before) before();
      reduce_gradients_of(module->parameters());
    };
  if (init == Init::Deferred) return;
  // Dropout on plain tensors draws from LibTorch's generator, which starts with another seed in every process. Ranks
  // with different samples or stages draw different masks.
  const int64_t stage_rank = has_stages() ? mesh_.get_local_rank("pp") : 0;
  at::manual_seed(config.training.seed + static_cast<uint64_t>(data_rank() + stage_rank * data_ranks()));
  const c10::Device device(config.training.device);
  if (!has_stages()) materialize(root, device);
  for (auto& stage : stages_) {
    materialize(stage.module(), device);
    if (config.training.compile) pipelining::compile_stage(stage, {.captures = Captures::None});
  }
  if (config.training.numerics == "invariant")
    for (auto& stage : stages_) {
      auto shards = std::make_shared<VirtualShards>(stage.module(), data_mesh(), config.training.virtual_shards);
      stage.after_backward = [shards] { shards->add_gradients(); };
      stage.reduce_grad = [shards] { shards->reduce_gradients(); };
      stage_shards_.push_back(std::move(shards));
    }
  if (has_stages())
    schedule_ = std::make_shared<pipelining::PipelineSchedule>(
        config.parallel.pipeline_schedule, stages_, microbatches_,
        [loss = loss_](const at::Tensor& output, const at::Tensor& target) { return (*loss)(output, target); },
        mesh_["pp"], pipelining::ScheduleOptions{.scale_grads = false});
  if (has_axis("dp") && !has_axis("fsdp") && mesh_.size("dp") > 1 && replicates) {
    ReplicateOptions options;
    options.device_mesh = mesh_["dp"];
    options.init_sync = false;  // all ranks initialize the same values; check_replicas() verifies it
    options.gradient_as_bucket_view = true;
    replicated_ = replicated(replicate(root, options));
  }
}

void ParallelModel::build_stages_of(const TrainConfig& config) {
  MeshShape shape{mesh_.shape(), mesh_.names()};
  const auto pipeline = pipeline_shape(config, shape);
  microbatches_ = pipeline.microbatches;
  const auto split = split_stages(language_model_, pipeline.stages());
  stages_ = pipelining::build_stages(module(), split, config.parallel.pipeline_schedule, mesh_["pp"]);
  for (auto& stage : stages_) {
    stage_layers_.push_back(split[static_cast<size_t>(stage.stage_index())]);
    names_.insert(stage.names.begin(), stage.names.end());
    if (has_axis("tp")) stage.mesh = mesh_["tp"];
  }
}

void ParallelModel::shard_over_fsdp(const TrainConfig& config) {
  FullyShardOptions options;
  options.mesh = has_axis("dp") ? mesh_[kRowAxes] : mesh_["fsdp"];
  options.mp_policy = precision_of(config);
  options.ignored_params = expert_parameters();  // sharded over ep
  const auto blocks = blocks_of(language_model_);
  if (!has_stages()) {
    for (const auto& block : blocks) fully_shard(*block, options);
    fsdp_module_ = fsdp_module(fully_shard(module(), options));
    return;
  }
  for (size_t i = 0; i < stages_.size(); i++) {
    for (const auto& block : blocks)
      if (uses(stage_layers_[i], block)) fully_shard(*block, options);
    fully_shard(stages_[i].module(), options);
    pipelining::use_fully_shard(stages_[i]);
  }
}

bool ParallelModel::has_axis(const std::string& name) const {
  const auto& names = mesh_.names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

int64_t ParallelModel::data_ranks() const {
  int64_t ranks = 1;
  for (const auto& axis : kRowAxes) ranks *= has_axis(axis) ? mesh_.size(axis) : 1;
  return ranks;
}

int64_t ParallelModel::data_rank() const {
  int64_t rank = 0;
  for (const auto& axis : kRowAxes)
    if (has_axis(axis)) rank = rank * mesh_.size(axis) + mesh_.get_local_rank(axis);
  return rank;
}

DeviceMesh ParallelModel::data_mesh() const {
  std::vector<std::string> axes;
  for (const auto& axis : kRowAxes)
    if (has_axis(axis)) axes.push_back(axis);
  return axes.empty() ? DeviceMesh() : mesh_[axes];
}

int64_t ParallelModel::loss_ranks() const { return data_ranks() * (has_axis("cp") ? mesh_.size("cp") : 1); }

void ParallelModel::sum_over_data(at::Tensor& values) const {
  for (const auto& axis : kTokenAxes)
    if (has_axis(axis) && mesh_.size(axis) > 1) mesh_.get_group(axis)->all_reduce(values, ReduceOp::Sum).wait();
}

at::Tensor ParallelModel::gather_over_data(const at::Tensor& value) const {
  auto all = at::zeros({loss_ranks()}, value.options());
  const int64_t part = has_axis("cp") ? mesh_.get_local_rank("cp") : 0;
  all[data_rank() * (loss_ranks() / data_ranks()) + part] = value;
  sum_over_data(all);
  return all;
}

void ParallelModel::sum_over_stages(at::Tensor& values) const {
  if (has_stages()) mesh_.get_group("pp")->all_reduce(values, ReduceOp::Sum).wait();
}

std::vector<NamedParameter> ParallelModel::parameters() const {
  std::vector<NamedParameter> found;
  for (const auto& item : module().named_parameters())
    if (has_parameter(item.key())) found.push_back({item.key(), item.value()});
  return found;
}

std::vector<at::Tensor> ParallelModel::counted_parameters() const {
  std::vector<at::Tensor> copies;  // that a rank with an earlier stage counts
  for (const auto& stage : stages_)
    for (const auto& shared : stage.shared)
      if (std::ranges::none_of(stages_, [&](const auto& s) { return s.stage_index() == shared.stages[0]; }))
        copies.push_back(shared.parameter);
  std::vector<at::Tensor> counted;
  for (const auto& [name, parameter] : parameters())
    if (!contains(copies, parameter)) counted.push_back(parameter);
  return counted;
}

int64_t ParallelModel::parameter_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, p] : parameters()) {
    const auto local = is_dtensor(p) ? DTensor(p.detach()).to_local() : p.detach();
    bytes += local.numel() * static_cast<int64_t>(local.element_size());
  }
  return bytes;
}

std::unique_ptr<ContextParallel> ParallelModel::context_scope() const {
  if (!has_axis("cp") || mesh_.size("cp") == 1) return nullptr;
  return std::make_unique<ContextParallel>(mesh_["cp"], context_options_);
}

at::Tensor ParallelModel::logits(const at::Tensor& tokens) {
  if (!has_stages()) return logits_of(language_model_, tokens);
  const int64_t rows = tokens.size(0), missing = microbatches_ - rows;
  if (missing <= 0) return schedule_->eval(tokens);
  // Every microbatch needs a row.
  const auto padded = schedule_->eval(at::cat({tokens, tokens.narrow(0, 0, 1).expand({missing, -1})}));
  return padded.defined() ? padded.narrow(0, 0, rows) : padded;
}

void ParallelModel::step_stages(const at::Tensor& input, const at::Tensor& target, const pipelining::LossFn& loss) {
  *loss_ = loss;
  schedule_->step(input, target);
  *loss_ = {};
}

void ParallelModel::set_gradient_sync(bool sync) {
  if (fsdp_module_) fsdp_module_->set_requires_gradient_sync(sync);
  if (replicated_) replicated_->set_requires_gradient_sync(sync);
}

std::vector<std::pair<int64_t, models::MoE>> ParallelModel::experts() const {
  std::vector<std::pair<int64_t, models::MoE>> found;
  const auto* llama = std::get_if<models::Llama>(&language_model_);
  if (!llama || (*llama)->config.moe.n_experts == 0) return found;
  auto layers = (*llama)->layers;
  int64_t index = 0;
  for (auto& layer : layers) {
    if (has_parameter(c10::str("layers.", index, ".moe.w1"))) found.emplace_back(index, layer->moe);
    index++;
  }
  return found;
}

std::vector<at::Tensor> ParallelModel::expert_parameters() const {
  std::vector<at::Tensor> found;
  if (expert_mesh_)
    for (const auto& [layer, moe] : experts()) found.insert(found.end(), {moe->w1, moe->w2, moe->w3});
  return found;
}

void ParallelModel::reduce_gradients() const {
  if (!reduced_axes_.empty() || expert_mesh_) reduce_gradients_of(module().parameters());
}

// The loss of a rank has the factor loss_ranks(). The gradient of an expert is the sum over the tokens of ep already.
void ParallelModel::reduce_gradients_of(const std::vector<at::Tensor>& parameters) const {
  const at::NoGradGuard no_grad;
  const auto of_experts = expert_parameters();
  std::vector<at::Tensor> gradients, expert_gradients;
  optim::detail::reduce_partial_gradients(parameters);
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.requires_grad()) continue;
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameter);
    if (is_dtensor(gradient)) gradient = optim::detail::redistribute_like(gradient, parameter);
    if (!optim::detail::local_or_self(gradient).is_contiguous())
      gradient = gradient.clone(at::MemoryFormat::Contiguous);
    (contains(of_experts, parameter) ? expert_gradients : gradients).push_back(optim::detail::local_or_self(gradient));
  }
  if (!gradients.empty())
    for (const auto& axis : reduced_axes_) mesh_.get_group(axis)->all_reduce_coalesced(gradients, ReduceOp::Avg).wait();
  if (expert_gradients.empty()) return;
  for (auto& gradient : expert_gradients) gradient.div_(expert_mesh_.size("ep"));
  if (expert_mesh_.size("edp") > 1)
    expert_mesh_.get_group("edp")->all_reduce_coalesced(expert_gradients, ReduceOp::Avg).wait();
}

}  // namespace tessera::train
