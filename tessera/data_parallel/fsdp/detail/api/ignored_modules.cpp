#include "tessera/data_parallel/fsdp/detail/api/ignored_modules.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/nn/module_tree.h"

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

bool contains(const std::vector<at::Tensor>& tensors, const at::Tensor& t) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& other) { return other.is_same(t); });
}

}  // namespace

bool Ignored::has(const Module& module) const {
  return std::find(modules.begin(), modules.end(), &module) != modules.end();
}

NamedTensors Ignored::parameters_left(const Module& module, const std::vector<const Module*>& taken) const {
  auto skipped = modules;
  skipped.insert(skipped.end(), taken.begin(), taken.end());
  auto left = parameters_of(module, skipped);
  Tensors below;  // a parameter of an ignored module that another shares is ignored, too
  for (const auto* ignored : modules)
    for (const auto& [name, value] : parameters_of(*ignored)) below.push_back(value);
  std::erase_if(left, [&](const NamedTensor& p) { return contains(parameters, p.value) || contains(below, p.value); });
  return left;
}

NamedTensors Ignored::buffers_left(const Module& module, const std::vector<const Module*>& taken) const {
  auto skipped = modules;
  skipped.insert(skipped.end(), taken.begin(), taken.end());
  return buffers_of(module, skipped);
}

void Ignored::check(const char* what, const Module& root) const {
  const auto below = root.modules();
  for (const auto* module : modules) {
    TESSERA_CHECK(module, UsageError, what, ": ignored_modules has a null pointer");
    TESSERA_CHECK(module != &root, UsageError, what, ": ", class_name(root),
                  " itself is in ignored_modules; then there is nothing to shard");
    TESSERA_CHECK(std::any_of(below.begin(), below.end(), [&](const auto& other) { return other.get() == module; }),
                  UsageError, what, ": ", class_name(*module), " is in ignored_modules, but not in ", class_name(root));
    TESSERA_CHECK(find_all(*module).empty(), UsageError, what, ": ", class_name(*module),
                  " is in ignored_modules, but something in it is sharded already");
  }
  const auto all = root.parameters();
  for (const auto& parameter : parameters)
    TESSERA_CHECK(contains(all, parameter), UsageError, what, ": ignored_parameters has a tensor of shape ",
                  parameter.defined() ? parameter.sizes() : c10::IntArrayRef(), " that is no parameter of ",
                  class_name(root));
}

bool is_list(const Module& module) {
  const auto name = class_name(module);
  return name.rfind("ModuleList", 0) == 0 || name.rfind("ModuleDict", 0) == 0;
}

}  // namespace tessera::data_parallel::fsdp
