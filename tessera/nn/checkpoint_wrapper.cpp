#include "tessera/nn/checkpoint_wrapper.h"

#include "tessera/nn/detail/hookable.h"

#include <memory>

namespace tessera {

HookHandle checkpoint_wrapper(Module& module, CheckpointOptions options) {
  return register_around_hook(
      module, [options = std::move(options)](Module&, const Tensors& inputs, const ForwardCall& forward) {
        return checkpoint(options, forward, inputs);
      });
}

std::vector<HookHandle> apply_activation_checkpointing(
    Module& root, const std::function<bool(const std::string& name, const Module& module)>& which,
    const CheckpointOptions& options) {
  std::vector<std::string> names;
  for (const auto& each : root.named_modules())
    if (!each.key().empty() && which(each.key(), *each.value())) names.push_back(each.key());
  std::vector<std::shared_ptr<Module>> chosen;
  for (const auto& name : names) chosen.push_back(hookable(root, name));
  std::vector<HookHandle> handles;
  for (const auto& module : chosen) handles.push_back(checkpoint_wrapper(*module, options));
  return handles;
}

}  // namespace tessera
