#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/modules.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <optional>

namespace tessera::nn::lora {
namespace {

const std::string kDown = "lora_A", kUp = "lora_B", kScale = "lora_scale";

bool is_target(const std::string& name, const std::vector<std::string>& targets) {
  if (targets.empty()) return true;
  for (const auto& target : targets)
    if (name == target ||
        (name.size() > target.size() && name.ends_with(target) && name[name.size() - target.size() - 1] == '.'))
      return true;
  return false;
}

// Read by name in each call: data parallelism replaces the parameters of a module.
const at::Tensor* find_own(const Module& module, const std::string& name, at::Tensor& found) {
  for (const auto& item : module.named_parameters(/*recurse=*/false))
    if (item.key() == name) {
      found = item.value();
      return &found;
    }
  return nullptr;
}

struct Adapter {
  at::Tensor down, up;
  static std::optional<Adapter> of(const Module& module) {
    Adapter adapter;
    if (!find_own(module, kDown, adapter.down) || !find_own(module, kUp, adapter.up)) return std::nullopt;
    return adapter;
  }
};

double scale_of(const Module& module) {
  for (const auto& item : module.named_buffers(/*recurse=*/false))
    if (item.key() == kScale) return item.value().item<double>();
  return 1;
}

}  // namespace

std::vector<std::string> add(Module& module, const Options& options) {
  TESSERA_CHECK(options.rank >= 1, UsageError, "lora::add: rank is ", options.rank, "; it must be at least 1");
  std::vector<std::string> names;
  std::vector<torch::nn::LinearImpl*> linears;
  std::string without_hooks;
  for (const auto& item : module.named_modules()) {
    auto* linear = dynamic_cast<torch::nn::LinearImpl*>(item.value().get());
    if (!linear || !is_target(item.key(), options.targets)) continue;
    if (!has_hook_point(*linear)) {
      without_hooks = item.key();
      continue;
    }
    TESSERA_CHECK(!Adapter::of(*linear), UsageError, "lora::add: '", item.key(), "' has an adapter already");
    TESSERA_CHECK(!is_dtensor(linear->weight), UsageError, "lora::add: the weight of '", item.key(), "' is ",
                  DTensor(linear->weight), "; add adapters before fully_shard and parallelize_module");
    names.push_back(item.key());
    linears.push_back(linear);
  }
  TESSERA_CHECK(!linears.empty(), UsageError, "lora::add: no Linear module of ", class_name(module), " is a target",
                without_hooks.empty() ? "" : c10::str("; '", without_hooks, "' has no hooks: use ts::nn::Linear"));
  for (auto& parameter : module.parameters()) parameter.requires_grad_(false);
  for (auto* linear : linears) {
    const auto like = linear->weight.options().requires_grad(false);
    const auto& o = linear->options;
    auto down = at::empty({options.rank, o.in_features()}, like),
         up = at::zeros({o.out_features(), options.rank}, like);
    torch::nn::init::kaiming_uniform_(down, std::sqrt(5.0));
    linear->register_parameter(kDown, down);
    linear->register_parameter(kUp, up);
    const double scale = options.alpha / static_cast<double>(options.rank);
    linear->register_buffer(kScale, at::scalar_tensor(scale, at::kDouble));
    register_forward_hook(*linear, [scale](Module& self, const Tensors& inputs, const Tensors& outputs) -> Replacement {
      const auto adapter = Adapter::of(self);
      if (!adapter) return std::nullopt;
      return Tensors{outputs[0] + at::linear(at::linear(inputs[0], adapter->down), adapter->up) * scale};
    });
  }
  return names;
}

std::vector<at::Tensor> parameters(const Module& module) {
  std::vector<at::Tensor> all;
  for (const auto& item : module.named_parameters())
    if (item.key().ends_with(kDown) || item.key().ends_with(kUp)) all.push_back(item.value());
  return all;
}

void merge(Module& module) {
  const at::NoGradGuard no_grad;
  for (const auto& child : module.modules()) {
    auto* linear = dynamic_cast<torch::nn::LinearImpl*>(child.get());
    const auto adapter = linear ? Adapter::of(*linear) : std::nullopt;
    if (!adapter) continue;
    TESSERA_CHECK(!is_dtensor(linear->weight) && !is_dtensor(adapter->down), UsageError,
                  "lora::merge: the weight is distributed, as ", DTensor(linear->weight),
                  "; load the checkpoint into a plain module and merge that");
    linear->weight.add_(at::matmul(adapter->up, adapter->down), scale_of(*linear));
    adapter->up.zero_();
  }
}

}  // namespace tessera::nn::lora
