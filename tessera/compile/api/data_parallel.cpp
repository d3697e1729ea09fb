#include "tessera/compile/api/data_parallel.h"

#include "tessera/base/error.h"
#include "tessera/comm/world.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace tessera {
namespace {

constexpr const char* kStyles[] = {"replicate", "fully_shard", "default"};

}  // namespace

DataParallel::DataParallel(std::string style, DataParallelOptions options)
    : style_(std::move(style)), options_(std::move(options)) {
  TESSERA_CHECK(std::find(std::begin(kStyles), std::end(kStyles), style_) != std::end(kStyles), UsageError,
                "DataParallel: there is no style \"", style_, "\"; write replicate, fully_shard or default");
  TESSERA_CHECK(options_.input_batch_dim >= 0, UsageError, "DataParallel: input_batch_dim is ",
                options_.input_batch_dim, "; count from the front");
  TESSERA_CHECK(!options_.mesh || options_.mesh.ndim() == 1, UsageError, "DataParallel: mesh ", options_.mesh,
                " has several axes; give the one that the batch is cut over, mesh[\"dp\"] say");
}

DeviceMesh DataParallel::mesh() const {
  return options_.mesh ? options_.mesh : init_device_mesh("cpu", {World::current().size()}, {"dp"});
}

Placement DataParallel::placement(const at::Tensor& parameter) const {
  if (style_ == "replicate" || parameter.dim() == 0) return Replicate();
  if (style_ == "fully_shard") return Shard(0);
  const bool even = parameter.size(0) % mesh().size() == 0;
  return even && parameter.numel() >= options_.shard_at_least ? Shard(0) : Replicate();
}

namespace compiler {
namespace {

Tensors parameters_of(const Arguments& arguments) {
  auto parameters = arguments.modules[0]->parameters();
  for (auto* optimizer : arguments.optimizers)
    for (const auto& group : optimizer->groups())
      for (const auto& p : group)
        if (std::none_of(parameters.begin(), parameters.end(), [&](const auto& other) { return other.is_same(p); }))
          parameters.push_back(p);
  return parameters;
}

}  // namespace

void check(const DataParallel& mode, const Arguments& arguments) {
  TESSERA_CHECK(arguments.modules.size() == 1, UsageError,
                "compile: under DataParallel the step takes one module; found ", arguments.modules.size(),
                " among its arguments. A lambda must not capture its model: give it as an argument");
  TESSERA_CHECK(arguments.optimizers.size() <= 1, UsageError,
                "compile: under DataParallel the step takes at most one optimizer; found ",
                arguments.optimizers.size());
  const auto dim = mode.options().input_batch_dim;
  for (size_t i = 0; i < arguments.tensors.size(); i++) {
    const auto& t = arguments.tensors[i];
    TESSERA_CHECK(!t.defined() || t.dim() == 0 || t.dim() > dim, UsageError, "compile: argument ", i, " of shape ",
                  t.sizes(), " has no dim ", dim, ", which input_batch_dim says is the batch");
  }
}

void partition(const DataParallel& mode, const Arguments& arguments) {
  const at::NoGradGuard no_grad;
  const auto mesh = mode.mesh();
  auto parameters = parameters_of(arguments);
  for (const auto& p : parameters)
    TESSERA_CHECK(!is_dtensor(p), UsageError, "compile: under DataParallel the model must be plain; a parameter is ",
                  DTensor(p));
  for (auto& p : parameters) {
    const auto placement = mode.placement(p);
    std::vector<std::pair<OptimizerAccess*, StateDict>> states;
    for (auto* optimizer : arguments.optimizers) {
      auto state = optimizer->state(p);
      if (state.empty()) continue;
      StateDict rows;
      for (const auto& row : optimizer->rows())
        if (const auto* value = state.find(row.name))
          rows.insert(row.name, row.like_parameter ? distribute_tensor(*value, mesh, {placement}) : *value);
      states.emplace_back(optimizer, std::move(rows));
    }
    auto gradient = std::exchange(p.mutable_grad(), {});
    distribute_in_place(p, mesh, {placement});
    if (gradient.defined()) p.mutable_grad() = distribute_tensor(gradient, mesh, {placement});
    for (auto& [optimizer, rows] : states) optimizer->set_state(p, std::move(rows));
  }
}

void WholeParameters::open(const DataParallel& mode, const Arguments& arguments) {
  const at::NoGradGuard no_grad;
  const auto mesh = mode.mesh();
  for (auto& p : parameters_of(arguments)) {
    Each each{p, p.detach(), 0};
    const auto placement = DTensor(p).placements()[0];
    p.set_data(DTensor(each.distributed).redistribute({Replicate()}).to_local());
    if (p.requires_grad())
      each.hook = p.register_hook([mesh, placement](const at::Tensor& gradient) -> at::Tensor {
        const at::NoGradGuard no_grad;
        return DTensor::from_local(gradient, mesh, {Partial(ReduceOp::Avg)}).redistribute({placement});
      });
    open_.push_back(std::move(each));
  }
}

void WholeParameters::close() {
  for (auto& [parameter, distributed, hook] : open_) {
    if (parameter.requires_grad()) parameter.remove_hook(hook);
    parameter.set_data(distributed);
  }
  open_.clear();
}

WholeParameters::~WholeParameters() { close(); }

}  // namespace compiler
}  // namespace tessera
