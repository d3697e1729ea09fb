#include "tessera/nn/checkpoint_wrapper.h"

#include "tessera/nn/detail/hookable.h"

#include <memory>
#include <vector>

namespace tessera {
namespace {

// The around hook of a wrapped module. It has a type of its own so that remove_checkpoint_wrapper can find it.
struct CheckpointedForward {
  CheckpointOptions options;
  Tensors operator()(Module&, const Tensors& inputs, const ForwardCall& forward) const {
    return checkpoint(options, forward, inputs);
  }
};

}  // namespace

Module& checkpoint_wrapper(Module& module, CheckpointOptions options) {
  register_around_hook(module, CheckpointedForward{std::move(options)});
  return module;
}

Module& remove_checkpoint_wrapper(Module& module) {
  detail::remove_around_hooks(module,
                              [](const AroundHook& hook) { return hook.target<CheckpointedForward>() != nullptr; });
  return module;
}

Module& apply_activation_checkpointing(
    Module& root, const std::function<bool(const std::string& name, const Module& module)>& check_fn,
    const CheckpointOptions& options) {
  std::vector<std::string> names;
  for (const auto& each : root.named_modules())
    if (!each.key().empty() && check_fn(each.key(), *each.value())) names.push_back(each.key());
  std::vector<std::shared_ptr<Module>> chosen;
  for (const auto& name : names) chosen.push_back(hookable(root, name));
  for (const auto& module : chosen) checkpoint_wrapper(*module, options);
  return root;
}

}  // namespace tessera
