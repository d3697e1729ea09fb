#include "tessera/data_parallel/fsdp/detail/api/ignored_modules.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/nn/module_tree.h"

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

bool contains_tensor(const std::vector<at::Tensor>& tensors, const at::Tensor& t) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& other) { return other.is_same(t); });
}

}  // namespace

bool IgnoredModules::has(const Module& module) const {
  return std::find(modules.begin(), modules.end(), &module) != modules.end();
}

NamedTensors IgnoredModules::parameters_to_shard(const Module& module,
                                                 const std::vector<const Module*>& already_sharded) const {
  auto skipped = modules;
  skipped.insert(skipped.end(), already_sharded.begin(), already_sharded.end());
  auto left = parameters_of(module, skipped);
  Tensors below;  // a tied parameter of an ignored module is ignored everywhere
  for (const auto* ignored : modules)
    for (const auto& [name, value] : parameters_of(*ignored)) below.push_back(value);
  std::erase_if(left, [&](const NamedTensor& p) {
    return contains_tensor(parameters, p.value) || contains_tensor(below, p.value);
  });
  return left;
}

NamedTensors IgnoredModules::buffers_to_shard(const Module& module,
                                              const std::vector<const Module*>& already_sharded) const {
  auto skipped = modules;
  skipped.insert(skipped.end(), already_sharded.begin(), already_sharded.end());
  return buffers_of(module, skipped);
}

void IgnoredModules::check(const char* what, const Module& root) const {
  const auto below = root.modules();
  for (const auto* module : modules) {
    TESSERA_CHECK(module, UsageError, what, ": ignored_modules has a null pointer");
    TESSERA_CHECK(module != &root, UsageError, what, ": ", class_name(root),
                  " itself is in ignored_modules, so there is nothing to shard; remove it from the list");
    TESSERA_CHECK(std::any_of(below.begin(), below.end(), [&](const auto& other) { return other.get() == module; }),
                  UsageError, what, ": ", class_name(*module), " is in ignored_modules, but not in ", class_name(root));
    TESSERA_CHECK(find_sharded_modules(*module).empty(), UsageError, what, ": ", class_name(*module),
                  " is in ignored_modules, but it or a module inside it is sharded already");
  }
  const auto all = root.parameters();
  for (const auto& parameter : parameters)
    TESSERA_CHECK(contains_tensor(all, parameter), UsageError, what, ": ignored_parameters has a tensor of shape ",
                  parameter.defined() ? parameter.sizes() : c10::IntArrayRef(), " that is not a parameter of ",
                  class_name(root));
}

bool is_module_container(const Module& module) {
  const auto name = class_name(module);
  return name.rfind("ModuleList", 0) == 0 || name.rfind("ModuleDict", 0) == 0;
}

}  // namespace tessera::data_parallel::fsdp
