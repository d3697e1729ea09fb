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

}  // namespace tessera::compiler
