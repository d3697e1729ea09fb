#include "tessera/data_parallel/fsdp/detail/api/module_registration.h"

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

// Gives access to the protected dict of parameters of a module.
struct ParameterDictAccess : torch::nn::Module {
  static auto member() { return &ParameterDictAccess::parameters_; }
};
auto& parameter_dict(torch::nn::Module& module) { return module.*ParameterDictAccess::member(); }

}  // namespace

ModuleRegistration::ModuleRegistration(torch::nn::Module& module, const std::vector<at::Tensor>& unflattened,
                                       const std::string& name, const at::Tensor& flat_param) {
  module.apply([&](torch::nn::Module& each) {
    const auto is_flattened = [&](const at::Tensor& t) {
      return std::any_of(unflattened.begin(), unflattened.end(), [&](const at::Tensor& p) { return p.is_same(t); });
    };
    Entry entry{&each, parameter_dict(each), ParameterDict()};
    if (&each == &module) entry.flat.insert(name, flat_param);
    bool changes = &each == &module;
    for (const auto& item : entry.unflattened)
      if (is_flattened(item.value()))
        changes = true;
      else
        entry.flat.insert(item.key(), item.value());
    if (changes) entries_.push_back(std::move(entry));  // other modules belong to inner groups
  });
  register_flat();
}

std::vector<torch::nn::Module*> ModuleRegistration::inner_modules() const {
  std::vector<torch::nn::Module*> modules;
  for (size_t i = 1; i < entries_.size(); i++) modules.push_back(entries_[i].module);
  return modules;
}

void ModuleRegistration::register_unflattened() {
  for (auto& entry : entries_) parameter_dict(*entry.module) = entry.unflattened;
}
void ModuleRegistration::register_flat() {
  for (auto& entry : entries_) parameter_dict(*entry.module) = entry.flat;
}

}  // namespace tessera::data_parallel::fsdp
