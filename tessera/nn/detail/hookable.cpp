#include "tessera/nn/detail/hookable.h"

#include "tessera/base/error.h"
#include "tessera/nn/module_tree.h"
#include "tessera/nn/modules.h"

#include <typeindex>
#include <unordered_map>

namespace tessera {
namespace {

using torch::nn::AnyModule;
using MakeHooked = AnyModule (*)(const Module& plain);

// One instantiation per class of torch::nn. It runs once per module, at setup, so it is compiled for size.
template <class Impl>
[[gnu::cold]] AnyModule make_hooked(const Module& plain) {
  return AnyModule(std::static_pointer_cast<Hooked<Impl>>(Hooked<Impl>::wrap_plain(plain)));
}

// The function for each class of torch::nn.
const std::unordered_map<std::type_index, MakeHooked>& torch_modules() {
  static const auto* functions = new std::unordered_map<std::type_index, MakeHooked>{
#define TESSERA_MAKE_HOOKED(Name) {typeid(torch::nn::Name##Impl), &make_hooked<torch::nn::Name##Impl>},
      TESSERA_FOR_EACH_TORCH_MODULE(TESSERA_MAKE_HOOKED)
#undef TESSERA_MAKE_HOOKED
          {typeid(torch::nn::EmbeddingImpl), &make_hooked<torch::nn::EmbeddingImpl>},
      {typeid(torch::nn::EmbeddingBagImpl), &make_hooked<torch::nn::EmbeddingBagImpl>},
  };
  return *functions;
}

[[noreturn]] void fail_no_hooks(std::string_view name, const Module& module, std::string_view or_else = "") {
  const auto kind = class_name(module);
  const bool of_torch = torch_modules().contains(typeid(module));
  TESSERA_FAIL(UsageError, "module '", name, "', a ", kind,
               ", cannot have a hook: its parent calls forward directly. Declare it as ",
               of_torch ? "tessera::nn::" + kind + " instead of torch::nn::" + kind
                        : "TESSERA_MODULE(" + kind + ") instead of TORCH_MODULE(" + kind + ")",
               or_else);
}

AnyModule hooked_version(const Module& plain, std::string_view name) {
  const auto found = torch_modules().find(typeid(plain));
  if (found == torch_modules().end()) fail_no_hooks(name, plain);
  return found->second(plain);
}

// The Sequential that calls the module `name`, and the AnyModule in it. Null if the parent is not a Sequential.
std::pair<torch::nn::SequentialImpl*, AnyModule*> caller_of(Module& root, std::string_view name, const Module& module) {
  if (name.empty()) return {nullptr, nullptr};
  const auto dot = name.rfind('.');
  const auto parent = get_submodule(root, dot == name.npos ? std::string_view() : name.substr(0, dot));
  if (auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(parent.get()))
    for (auto& child : *sequential)
      if (child.ptr().get() == &module) return {sequential, &child};
  return {nullptr, nullptr};
}

}  // namespace

void make_hookable(AnyModule& module) {
  if (!has_hook_point(*module.ptr())) module = hooked_version(*module.ptr(), class_name(*module.ptr()));
}

bool can_be_hooked(Module& root, std::string_view name) {
  const auto module = get_submodule(root, name);
  if (has_hook_point(*module)) return true;
  return torch_modules().contains(typeid(*module)) && caller_of(root, name, *module).first;
}

void fail_not_hookable(Module& root, std::string_view name, std::string_view or_else) {
  fail_no_hooks(name, *get_submodule(root, name), or_else);
}

std::shared_ptr<Module> hookable(Module& root, std::string_view name) {
  auto module = get_submodule(root, name);
  if (has_hook_point(*module)) return module;
  const auto [sequential, child] = caller_of(root, name, *module);
  if (!sequential) fail_no_hooks(name, *module);
  *child = hooked_version(*module, name);
  sequential->replace_module(std::string(name.substr(name.rfind('.') + 1)), child->ptr());
  return child->ptr();
}

}  // namespace tessera
