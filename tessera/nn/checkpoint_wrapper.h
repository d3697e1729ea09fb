#pragma once
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/hooks.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <string>
#include <type_traits>
#include <utility>

// Activation checkpointing of modules, in place: the module keeps its type and its parameter names. (PyTorch's
// checkpoint_wrapper returns a new module around the old one.) Hooks of the module itself run once, outside the
// checkpoint. Hooks of its submodules run again in recomputation; recomputing() is then true.
namespace tessera {

// Makes every call of `module` a checkpoint(). Returns `module`. Throws UsageError if no Holder created the module.
// Example:  for (auto& block : *model->blocks) checkpoint_wrapper(block);
torch::nn::Module& checkpoint_wrapper(torch::nn::Module& module, CheckpointOptions options = {});
// The same for a holder. Returns the holder.
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H& checkpoint_wrapper(
    H& holder, CheckpointOptions options = {}) {
  checkpoint_wrapper(static_cast<torch::nn::Module&>(*holder.ptr()), std::move(options));
  return holder;
}

// Undoes all checkpoint_wrapper calls for this module; submodules keep theirs. Does nothing if there was none.
// Returns `module`.
torch::nn::Module& remove_checkpoint_wrapper(torch::nn::Module& module);
// The same for a holder. Returns the holder.
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H& remove_checkpoint_wrapper(H& holder) {
  remove_checkpoint_wrapper(static_cast<torch::nn::Module&>(*holder.ptr()));
  return holder;
}

// Calls checkpoint_wrapper for each submodule of `root` that check_fn(name, submodule) returns true for. Makes children
// of Sequential hookable where necessary. Throws UsageError, and wraps no module, if one of them cannot have hooks.
// Returns `root`.
// Example:  apply_activation_checkpointing(*model, [](const std::string&, const Module& m) {
//             return dynamic_cast<const BlockImpl*>(&m) != nullptr; });
torch::nn::Module& apply_activation_checkpointing(
    torch::nn::Module& root,
    const std::function<bool(const std::string& name, const torch::nn::Module& module)>& check_fn,
    const CheckpointOptions& options = {});

}  // namespace tessera
