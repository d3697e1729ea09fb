#pragma once
#include "tessera/base/detail/module_name.h"

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <string_view>

// Finding things in a tree of modules, by PyTorch's names.
namespace tessera {

using torch::nn::Module;

// "Linear" for a LinearImpl, whoever made it.
std::string class_name(const Module& module);

// layers.0.attn.wq; "" is the module itself. Throws UsageError that says how far the name led and what is there.
std::shared_ptr<Module> get_submodule(Module& root, std::string_view name);

// layers.0.attn.wq.weight. A handle: what is written through it is seen by the module.
at::Tensor get_parameter(Module& root, std::string_view name);
at::Tensor get_buffer(Module& root, std::string_view name);

namespace detail {

// For ModuleFrame::name, where frame.module is a Module.
std::string path_of(const ModuleFrame& frame);

}  // namespace detail
}  // namespace tessera
