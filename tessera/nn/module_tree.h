#pragma once
#include "tessera/base/detail/module_name.h"

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <string_view>

// Looks up submodules, parameters and buffers by PyTorch's dotted names.
namespace tessera {

using torch::nn::Module;  // the base class of all modules

// The class name without "Impl" and namespaces: "Linear" for a torch::nn::LinearImpl and for a tessera::nn::Linear.
std::string class_name(const Module& module);

// The submodule with this name; "" is `root` itself. The UsageError for an unknown name lists the children of the last
// module that exists on the path.
// Example:  auto wq = get_submodule(*model, "layers.0.attn.wq");
std::shared_ptr<Module> get_submodule(Module& root, std::string_view name);

// The parameter with this name, such as "layers.0.attn.wq.weight". It shares memory with the module's parameter.
at::Tensor get_parameter(Module& root, std::string_view name);
// The buffer with this name.
at::Tensor get_buffer(Module& root, std::string_view name);

namespace detail {

// The ModuleFrame::name function for frames whose `module` points to a Module.
std::string path_of(const ModuleFrame& frame);

}  // namespace detail
}  // namespace tessera
