#include "tessera/data_parallel/detail/named_tensor.h"

#include <algorithm>
#include <unordered_set>

namespace tessera::data_parallel {
namespace {

using torch::nn::Module;

struct Walk {
  const std::vector<const Module*>& ignored;
  bool buffers;
  NamedTensors found = {};
  std::unordered_set<const void*> seen = {};

  void take(const std::string& name, const at::Tensor& value) {
    if (value.defined() && seen.insert(value.unsafeGetTensorImpl()).second) found.push_back({name, value});
  }
  void into(const Module& module, const std::string& prefix) {
    if (std::find(ignored.begin(), ignored.end(), &module) != ignored.end()) return;
    for (const auto& item : buffers ? module.named_buffers(false) : module.named_parameters(false))
      take(prefix + item.key(), item.value());
    for (const auto& child : module.named_children()) into(*child.value(), prefix + child.key() + ".");
  }
};

}  // namespace

NamedTensors parameters_of(const Module& module, const std::vector<const Module*>& ignored) {
  Walk walk{ignored, false};
  walk.into(module, "");
  return std::move(walk.found);
}

NamedTensors buffers_of(const Module& module, const std::vector<const Module*>& ignored) {
  Walk walk{ignored, true};
  walk.into(module, "");
  return std::move(walk.found);
}

std::string join_names(const std::vector<std::string>& names, size_t most) {
  std::string text;
  for (size_t i = 0; i < std::min(most, names.size()); i++) text += (i ? ", " : "") + names[i];
  if (names.size() > most) text += " and " + std::to_string(names.size() - most) + " more";
  return text;
}

}  // namespace tessera::data_parallel
