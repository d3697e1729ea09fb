#include "tessera/data_parallel/fsdp/detail/api/registry.h"

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

using torch::nn::Module;

// A module's own dict of parameters, which LibTorch keeps to the module itself.
struct Peek : Module {
  static auto parameters() { return &Peek::parameters_; }
};
auto& registered(Module& module) { return module.*Peek::parameters(); }

}  // namespace

Registration::Registration(Module& module, const std::vector<at::Tensor>& originals, const std::string& name,
                           const at::Tensor& flat) {
  module.apply([&](Module& each) {
    const auto taken = [&](const at::Tensor& t) {
      return std::any_of(originals.begin(), originals.end(), [&](const at::Tensor& other) { return other.is_same(t); });
    };
    Owner owner{&each, registered(each), Dict()};
    if (&each == &module) owner.flat.insert(name, flat);
    bool any = &each == &module;
    for (const auto& item : owner.originals)
      if (taken(item.value()))
        any = true;
      else
        owner.flat.insert(item.key(), item.value());
    if (any) owners_.push_back(std::move(owner));  // the others belong to units inside
  });
  show_flat();
}

std::vector<Module*> Registration::taken_from() const {
  std::vector<Module*> modules;
  for (size_t i = 1; i < owners_.size(); i++) modules.push_back(owners_[i].module);
  return modules;
}

void Registration::show_originals() {
  for (auto& owner : owners_) registered(*owner.module) = owner.originals;
}
void Registration::show_flat() {
  for (auto& owner : owners_) registered(*owner.module) = owner.flat;
}

}  // namespace tessera::data_parallel::fsdp
