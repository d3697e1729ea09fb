#include "tessera/data_parallel/fsdp/registry.h"

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

using torch::nn::Module;
using Dict = torch::OrderedDict<std::string, at::Tensor>;

struct Peek : Module {
  static Dict Module::*parameters() { return &Peek::parameters_; }
};

}  // namespace

Dict& registered(Module& module) { return module.*Peek::parameters(); }

Unregistered::Unregistered(Module& module, const std::vector<at::Tensor>& tensors) {
  module.apply([&](Module& each) {
    auto& dict = registered(each);
    const auto taken = [&](const at::Tensor& t) {
      return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& other) { return other.is_same(t); });
    };
    Owner owner{&each, dict, Dict()};
    for (const auto& item : dict)
      if (!taken(item.value())) owner.rest.insert(item.key(), item.value());
    if (owner.rest.size() < owner.all.size()) owners_.push_back(std::move(owner));
  });
  take_out();
}

void Unregistered::put_back() {
  for (auto& owner : owners_) registered(*owner.module) = owner.all;
}
void Unregistered::take_out() {
  for (auto& owner : owners_) registered(*owner.module) = owner.rest;
}

}  // namespace tessera::data_parallel::fsdp
