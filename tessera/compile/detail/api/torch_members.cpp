// The members of LibTorch's modules, which forward reads: options (dropout p, eps, strides), weights.
#include "tessera/compile/detail/api/module_guard.h"
#include "tessera/nn/modules.h"

#include <string_view>
#include <typeinfo>

namespace tessera::compiler {
namespace {

// The mangled name of a module's class. For a module that a Holder has created, Hooked<Impl>, it is that of Impl. A
// class that a user derives from one of LibTorch has another name, and may have more members.
std::string_view class_of(const torch::nn::Module& module) {
  constexpr std::string_view kBegin = "N7tessera6HookedI", kEnd = "EE";
  std::string_view name = typeid(module).name();
  return name.starts_with(kBegin) ? name.substr(kBegin.size(), name.size() - kBegin.size() - kEnd.size()) : name;
}

template <class Impl>
bool find_members_as(const torch::nn::Module& module, std::string_view name, CallArguments::ModuleObject& found) {
  if (name != typeid(Impl).name()) return false;
  found = {&static_cast<const Impl&>(module), sizeof(Impl)};
  return true;
}

}  // namespace

CallArguments::ModuleObject find_torch_members(const torch::nn::Module& module) {
  CallArguments::ModuleObject found;
  const auto name = class_of(module);
#define TESSERA_FIND_MEMBERS(Name) || find_members_as<torch::nn::Name##Impl>(module, name, found)
  (void)(find_members_as<torch::nn::Module>(module, name, found) ||
         find_members_as<torch::nn::EmbeddingImpl>(module, name, found) ||
         find_members_as<torch::nn::EmbeddingBagImpl>(module, name, found) ||
         find_members_as<torch::nn::SequentialImpl>(module, name, found) ||
         find_members_as<nn::SequentialImpl>(module, name, found) ||
         find_members_as<torch::nn::ModuleListImpl>(module, name, found) ||
         find_members_as<torch::nn::ModuleDictImpl>(module, name, found) ||
         find_members_as<torch::nn::ParameterListImpl>(module, name, found) ||
         find_members_as<torch::nn::ParameterDictImpl>(module, name, found)
             TESSERA_FOR_EACH_TORCH_MODULE(TESSERA_FIND_MEMBERS));
#undef TESSERA_FIND_MEMBERS
  return found;
}

std::vector<CallArguments::ModuleObject> find_torch_lists(const torch::nn::Module& module) {
  std::vector<CallArguments::ModuleObject> lists;
  const auto add = [&](const auto& list) {
    if (!list.empty()) lists.push_back({list.data(), list.size() * sizeof(list[0])});
  };
  const auto name = class_of(module);
  const auto is = [&]<class Impl>(const Impl*& found) {
    if (name == typeid(Impl).name()) found = &static_cast<const Impl&>(module);
    return found != nullptr;
  };
  const torch::nn::LayerNormImpl* norm = nullptr;
  const torch::nn::UpsampleImpl* upsample = nullptr;
  const torch::nn::UnflattenImpl* unflatten = nullptr;
  const torch::nn::AdaptiveLogSoftmaxWithLossImpl* softmax = nullptr;
  if (is(norm)) add(norm->options.normalized_shape());
  if (is(upsample) && upsample->options.size()) add(*upsample->options.size());
  if (is(upsample) && upsample->options.scale_factor()) add(*upsample->options.scale_factor());
  if (is(unflatten)) add(unflatten->options.sizes());
  if (is(softmax)) add(softmax->options.cutoffs()), add(softmax->cutoffs);
  return lists;
}

}  // namespace tessera::compiler
