#include "tessera/data_parallel/fsdp/detail/api/parameter_ownership.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/nn/module_tree.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace tessera::data_parallel::fsdp {
namespace {

// Names of the owning groups. Ranks may be threads of one process: they share the table, with different addresses.
struct OwnerTable {
  std::mutex mutex;
  std::unordered_map<const void*, std::string> parameters;
  std::unordered_map<const Module*, std::pair<std::string, std::weak_ptr<Module>>> modules;
};
OwnerTable& owners() {
  static OwnerTable it;
  return it;
}

struct Ownership {
  std::vector<at::Tensor> parameters;  // references, so that no other tensor gets the same address
  std::vector<const Module*> modules = {};

  ~Ownership() {
    const std::lock_guard lock(owners().mutex);
    for (const auto& parameter : parameters) owners().parameters.erase(parameter.unsafeGetTensorImpl());
    for (const auto* module : modules) owners().modules.erase(module);
  }
};

}  // namespace

std::shared_ptr<void> own_parameters(const std::string& group, const std::vector<at::Tensor>& parameters,
                                     const std::vector<Module*>& modules) {
  auto ownership = std::make_shared<Ownership>(Ownership{parameters});
  const std::lock_guard lock(owners().mutex);
  for (const auto& parameter : parameters) owners().parameters[parameter.unsafeGetTensorImpl()] = group;
  for (auto* module : modules) {
    ownership->modules.push_back(module);
    owners().modules[module] = {group, module->weak_from_this()};
  }
  return ownership;
}

void check_not_owned(const char* what, const Module& module, const NamedTensors& parameters) {
  const auto sharded_below = fsdp_modules(module);  // these may own parameters below `module`
  const auto below = module.modules();
  const std::lock_guard lock(owners().mutex);
  for (const auto& [name, value] : parameters) {
    const auto found = owners().parameters.find(value.unsafeGetTensorImpl());
    if (found == owners().parameters.end()) continue;
    TESSERA_FAIL(UsageError, what, ": parameter ", name, " is sharded already, as part of ", found->second,
                 "; shard inner modules before outer ones, and shard modules that share a parameter as one group");
  }
  for (const auto& each : below) {
    const auto found = owners().modules.find(each.get());
    if (found == owners().modules.end() || found->second.second.expired()) continue;
    const bool owner_is_below = std::any_of(sharded_below.begin(), sharded_below.end(), [&](const Module* sharded) {
      const auto inside = sharded->modules();
      return std::any_of(inside.begin(), inside.end(), [&](const auto& m) { return m == each; });
    });
    TESSERA_CHECK(owner_is_below, UsageError, what, ": the parameters of ", class_name(*each),
                  " are part of the flat parameter of ", found->second.first,
                  " already; shard inner modules before outer ones");
  }
}

}  // namespace tessera::data_parallel::fsdp
