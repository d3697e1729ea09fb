#pragma once
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/hooks.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

// Activation checkpointing of whole modules, attached in place: the module, its type and its names stay what they are.
// Hooks of the module itself run once, around the checkpoint; those of modules inside run again with recomputation,
// where recomputing() is true.
namespace tessera {

// Every call of `module` is a checkpoint() from now on, until the handle's remove(). Throws UsageError if the module
// was not made by a Holder.
// Example:  for (auto& block : *model->blocks) checkpoint_wrapper(block);
HookHandle checkpoint_wrapper(Module& module, CheckpointOptions options = {});
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> HookHandle
checkpoint_wrapper(const H& holder, CheckpointOptions options = {}) {
  return checkpoint_wrapper(static_cast<Module&>(*holder.ptr()), std::move(options));
}

// Wraps each module below `root` that `which` chooses by its name and itself; children of Sequential are made hookable
// for it. Throws UsageError if one of them cannot have hooks, and wraps none then.
// Example:  apply_activation_checkpointing(*model, [](const std::string&, const Module& m) {
//             return dynamic_cast<const BlockImpl*>(&m) != nullptr; });
std::vector<HookHandle> apply_activation_checkpointing(
    Module& root, const std::function<bool(const std::string& name, const Module& module)>& which,
    const CheckpointOptions& options = {});

}  // namespace tessera
