#include "tessera/data_parallel/detail/named_tensor.h"

#include "tessera/dtensor/detail/meta.h"

#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <unordered_set>

namespace tessera::data_parallel {
namespace {

struct TensorCollector {
  const std::vector<const torch::nn::Module*>& ignored;
  bool buffers;
  NamedTensors found = {};
  std::unordered_set<const void*> seen = {};

  void add(const std::string& name, const at::Tensor& value) {
    if (value.defined() && seen.insert(value.unsafeGetTensorImpl()).second) found.push_back({name, value});
  }
  void visit(const torch::nn::Module& module, const std::string& prefix) {
    if (std::find(ignored.begin(), ignored.end(), &module) != ignored.end()) return;
    for (const auto& item : buffers ? module.named_buffers(false) : module.named_parameters(false))
      add(prefix + item.key(), item.value());
    for (const auto& child : module.named_children()) visit(*child.value(), prefix + child.key() + ".");
  }
};

}  // namespace

NamedTensors parameters_of(const torch::nn::Module& module, const std::vector<const torch::nn::Module*>& ignored) {
  TensorCollector collector{ignored, /*buffers=*/false};
  collector.visit(module, "");
  return std::move(collector.found);
}

std::vector<at::Tensor> sparse_parameters_of(const torch::nn::Module& module,
                                             const std::vector<const torch::nn::Module*>& ignored) {
  if (std::find(ignored.begin(), ignored.end(), &module) != ignored.end()) return {};
  std::vector<at::Tensor> found;
  if (const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module))
    if (embedding->options.sparse()) found.push_back(embedding->weight);
  if (const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&module))
    if (bag->options.sparse()) found.push_back(bag->weight);
  for (const auto& child : module.children())
    for (const auto& parameter : sparse_parameters_of(*child, ignored)) found.push_back(parameter);
  return found;
}

NamedTensors buffers_of(const torch::nn::Module& module, const std::vector<const torch::nn::Module*>& ignored) {
  TensorCollector collector{ignored, /*buffers=*/true};
  collector.visit(module, "");
  return std::move(collector.found);
}

std::string device_type_of(const NamedTensors& parameters) {
  if (parameters.empty()) return "cpu";
  const auto device = tessera::detail::local_or_self(parameters[0].value).device();
  return device.is_meta() ? "cpu" : c10::DeviceTypeName(device.type(), /*lower_case=*/true);
}

std::string join_names(const std::vector<std::string>& names, size_t most) {
  std::string text;
  for (size_t i = 0; i < std::min(most, names.size()); i++) text += (i ? ", " : "") + names[i];
  if (names.size() > most) text += " and " + std::to_string(names.size() - most) + " more";
  return text;
}

}  // namespace tessera::data_parallel
