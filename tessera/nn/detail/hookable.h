#pragma once
#include "tessera/nn/hooks.h"

#include <torch/nn/modules/container/any.h>

#include <memory>
#include <string_view>

// Hooks for modules that a torch::nn holder created. If an AnyModule calls the module, it can be replaced by a module
// of a derived class that has hooks and shares parameters and children with the original:
//
//   torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::ReLU())     children become hookable on request
//   torch::nn::Linear fc                                                  a typed member cannot be replaced
namespace tessera {

// The submodule `name` of `root` ("" is `root` itself). Makes it hookable if necessary. Throws UsageError, and changes
// nothing, if that is not possible.
std::shared_ptr<Module> hookable(Module& root, std::string_view name);

// Whether hookable(root, name) would succeed. Changes nothing.
bool can_be_hooked(Module& root, std::string_view name);

// Throws the UsageError of hookable(root, name): it says what to write instead, and ends with `or_else`.
[[noreturn]] void fail_not_hookable(Module& root, std::string_view name, std::string_view or_else = "");

// Makes the module of an AnyModule hookable. Supports the classes of torch::nn. Throws UsageError for others.
void make_hookable(torch::nn::AnyModule& module);

}  // namespace tessera
