#pragma once
#include "tessera/nn/hooks.h"

#include <torch/nn/modules/container/any.h>

#include <memory>
#include <string_view>

// Hooks for modules that were written without our holders. Where a module is called through an AnyModule, the object
// behind can be swapped for one of the same class that takes hooks and shares its parameters and children:
//
//   torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::ReLU())        children become hookable when asked
//   torch::nn::Linear fc                                                     a typed member cannot: nothing passes by
namespace tessera {

// The module `name` below root ("" is root itself), made hookable if need be. Throws UsageError, with nothing changed,
// where that cannot be.
std::shared_ptr<Module> hookable(Module& root, std::string_view name);

// Would hookable(root, name) give a module? Changes nothing.
bool can_be_hooked(Module& root, std::string_view name);

// hookable for an AnyModule of yours. Knows the classes of torch::nn.
void make_hookable(torch::nn::AnyModule& module);

}  // namespace tessera
