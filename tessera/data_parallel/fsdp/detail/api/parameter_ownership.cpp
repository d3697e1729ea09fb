#include "tessera/data_parallel/fsdp/detail/api/parameter_ownership.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/nn/module_tree.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace tessera::data_parallel::fsdp {
namespace {

// Of all ranks that are threads of this process: they find their own by address.
struct Table {
  std::mutex mutex;
  std::unordered_map<const void*, std::string> parameters;
  std::unordered_map<const Module*, std::pair<std::string, std::weak_ptr<Module>>> modules;
};
Table& table() {
  static Table it;
  return it;
}

struct Claim {
  std::vector<at::Tensor> parameters;  // held: an address is theirs for as long
  std::vector<const Module*> modules = {};

  ~Claim() {
    const std::lock_guard lock(table().mutex);
    for (const auto& parameter : parameters) table().parameters.erase(parameter.unsafeGetTensorImpl());
    for (const auto* module : modules) table().modules.erase(module);
  }
};

}  // namespace

std::shared_ptr<void> claim(const std::string& unit, const std::vector<at::Tensor>& parameters,
                            const std::vector<Module*>& modules) {
  auto made = std::make_shared<Claim>(Claim{parameters});
  const std::lock_guard lock(table().mutex);
  for (const auto& parameter : parameters) table().parameters[parameter.unsafeGetTensorImpl()] = unit;
  for (auto* module : modules) {
    made->modules.push_back(module);
    table().modules[module] = {unit, module->weak_from_this()};
  }
  return made;
}

void check_unclaimed(const char* what, const Module& module, const NamedTensors& parameters) {
  const auto own = fsdp_modules(module);  // those inside have claimed theirs rightly
  const auto below = module.modules();
  const std::lock_guard lock(table().mutex);
  for (const auto& [name, value] : parameters) {
    const auto found = table().parameters.find(value.unsafeGetTensorImpl());
    if (found == table().parameters.end()) continue;
    TESSERA_FAIL(UsageError, what, ": parameter ", name, " is sharded already, as part of ", found->second,
                 "; shard inner modules before outer ones, and modules that share a parameter as one");
  }
  for (const auto& each : below) {
    const auto found = table().modules.find(each.get());
    if (found == table().modules.end() || found->second.second.expired()) continue;
    const bool by_one_inside = std::any_of(own.begin(), own.end(), [&](const Module* sharded) {
      const auto inside = sharded->modules();
      return std::any_of(inside.begin(), inside.end(), [&](const auto& m) { return m == each; });
    });
    TESSERA_CHECK(by_one_inside, UsageError, what, ": the parameters of ", class_name(*each),
                  " are part of the flat parameter of ", found->second.first,
                  " already; shard inner modules before outer ones");
  }
}

}  // namespace tessera::data_parallel::fsdp
