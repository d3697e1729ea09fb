#include "tessera/nn/detail/hookable.h"

#include "tessera/base/error.h"
#include "tessera/nn/module_tree.h"
#include "tessera/nn/modules.h"

#include <typeindex>
#include <unordered_map>

namespace tessera {
namespace {

using torch::nn::AnyModule;
using Swap = AnyModule (*)(const Module&);

template <class Impl>
AnyModule swapped(const Module& plain) {
  return AnyModule(std::make_shared<Hooked<Impl>>(dynamic_cast<const Impl&>(plain)));
}

// By the class of the plain module.
const std::unordered_map<std::type_index, Swap>& swaps() {
  static const auto* rows = new std::unordered_map<std::type_index, Swap>{
#define TESSERA_SWAP(Name) {typeid(torch::nn::Name##Impl), &swapped<torch::nn::Name##Impl>},
      TESSERA_FOR_EACH_TORCH_MODULE(TESSERA_SWAP)
#undef TESSERA_SWAP
          {typeid(torch::nn::EmbeddingImpl), &swapped<torch::nn::EmbeddingImpl>},
      {typeid(torch::nn::EmbeddingBagImpl), &swapped<torch::nn::EmbeddingBagImpl>},
  };
  return *rows;
}

[[noreturn]] void refuse(std::string_view name, const Module& module) {
  const auto kind = class_name(module);
  const bool of_torch = swaps().contains(typeid(module));
  TESSERA_FAIL(UsageError, "module '", name, "', a ", kind,
               ", cannot have the hook that was asked for: it is called past every hook. Declare it as ",
               of_torch ? "tessera::nn::" + kind + " in place of torch::nn::" + kind
                        : "TESSERA_MODULE(" + kind + ") in place of TORCH_MODULE(" + kind + ")");
}

AnyModule swap_for(const Module& plain, std::string_view name) {
  const auto row = swaps().find(typeid(plain));
  if (row == swaps().end()) refuse(name, plain);
  return row->second(plain);
}

}  // namespace

void make_hookable(AnyModule& module) {
  if (!has_hook_point(*module.ptr())) module = swap_for(*module.ptr(), class_name(*module.ptr()));
}

namespace {

// The Sequential that calls the module `name`, and the AnyModule in it; null if it hangs elsewhere.
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

bool can_be_hooked(Module& root, std::string_view name) {
  const auto module = get_submodule(root, name);
  if (has_hook_point(*module)) return true;
  return swaps().contains(typeid(*module)) && caller_of(root, name, *module).first;
}

std::shared_ptr<Module> hookable(Module& root, std::string_view name) {
  auto module = get_submodule(root, name);
  if (has_hook_point(*module)) return module;
  const auto [sequential, child] = caller_of(root, name, *module);
  if (!sequential) refuse(name, *module);
  *child = swap_for(*module, name);
  sequential->replace_module(std::string(name.substr(name.rfind('.') + 1)), child->ptr());
  return child->ptr();
}

}  // namespace tessera
