#include "tessera/nn/detail/backward_hooks.h"

#include "tessera/base/detail/libtorch_autograd_compat.h"
#include "tessera/base/error.h"
#include "tessera/nn/module_tree.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace tessera::detail {

using torch::autograd::Node;
using torch::autograd::variable_list;

void replace_tensors(Tensors& tensors, Replacement with, const char* kind, const char* what,
                     const std::string* module) {
  if (!with) return;
  TESSERA_CHECK(with->size() == tensors.size(), UsageError, kind, " of module ", module ? *module : running_module(),
                " returned ", with->size(), " ", what, "; it received ", tensors.size(),
                " and must return as many, or nothing to leave them unchanged");
  tensors = std::move(*with);
}

struct BackwardHooks::State {
  Module& module;
  std::string name;  // the full name, for errors in backward
  HookList<BackwardPreHook>::Entries pre;
  HookList<BackwardHook>::Entries hooks;
  size_t inputs = 0;
  bool input_has_grad = false;
  // Set by [B] and read by [A] of one backward. Empty in [A]: no gradient went through the outputs.
  std::optional<Tensors> grad_outputs = {};
};

namespace {

using State = BackwardHooks::State;

// Replaces the tensors that require gradients by aliases whose grad_fn is a new node. The aliases share the version
// counter, so in-place writes are still detected. False if no tensor requires a gradient.
template <class MakeNode>
bool insert_node(Tensors& tensors, MakeNode make) {
  std::vector<size_t> with_grad;
  for (size_t i = 0; i < tensors.size(); i++)
    if (tensors[i].defined() && tensors[i].requires_grad()) with_grad.push_back(i);
  if (with_grad.empty() || !at::GradMode::is_enabled()) return false;
  torch::autograd::edge_list edges;
  for (size_t i : with_grad) edges.push_back(torch::autograd::impl::gradient_edge(tensors[i]));
  auto node = make(with_grad, tensors.size());
  node->set_next_edges(std::move(edges));
  for (size_t i : with_grad) {
    auto alias = tensors[i].detach();
    torch::autograd::set_history(alias, node);
    tensors[i] = std::move(alias);
  }
  return true;
}

Tensors spread(const variable_list& gradients, const std::vector<size_t>& at, size_t count) {
  Tensors all(count);
  for (size_t i = 0; i < at.size(); i++) all[at[i]] = gradients[i];
  return all;
}
variable_list gather(const Tensors& all, const std::vector<size_t>& at) {
  variable_list some;
  for (size_t i : at) some.push_back(all[i]);
  return some;
}

struct ModuleHookNode : Node {
  std::shared_ptr<State> state;
  std::shared_ptr<Module> alive;  // the hooks receive the module
  std::vector<size_t> at;
  size_t count = 0;
};

struct ModuleOutputs final : ModuleHookNode {
  variable_list apply(variable_list&& gradients) override {
    auto grad_outputs = spread(gradients, at, count);
    for (const auto& entry : state->pre)
      replace_tensors(grad_outputs, entry->hook(state->module, grad_outputs), "a backward pre hook",
                      "gradients of outputs", &state->name);
    if (state->input_has_grad) {
      state->grad_outputs = grad_outputs;
    } else {
      const Tensors none(state->inputs);
      for (const auto& entry : state->hooks) {
        const auto result = entry->hook(state->module, none, grad_outputs);
        for (const auto& t : result.value_or(Tensors{}))
          TESSERA_CHECK(!t.defined(), UsageError, "a backward hook of module ", state->name,
                        " returned a gradient, but no input of the module needs one: return nothing");
      }
    }
    return gather(grad_outputs, at);
  }
};

struct ModuleInputs final : ModuleHookNode {
  variable_list apply(variable_list&& gradients) override {
    if (!state->grad_outputs) return std::move(gradients);
    const auto grad_outputs = std::move(*state->grad_outputs);
    state->grad_outputs.reset();
    auto grad_inputs = spread(gradients, at, count);
    for (const auto& entry : state->hooks)
      replace_tensors(grad_inputs, entry->hook(state->module, grad_inputs, grad_outputs), "a backward hook",
                      "gradients of inputs", &state->name);
    return gather(grad_inputs, at);
  }
};

template <class T>
auto node_maker(const std::shared_ptr<State>& state) {
  return [&state](std::vector<size_t> at, size_t count) {
    auto node = libtorch::make_node<T>();
    node->state = state;
    node->alive = state->module.shared_from_this();
    node->at = std::move(at);
    node->count = count;
    return node;
  };
}

}  // namespace

BackwardHooks::BackwardHooks(Module& module, const ModuleHooks& hooks) {
  if (hooks.backward_pre.empty() && hooks.backward.empty()) return;
  state_ =
      std::make_shared<State>(State{module, running_module(), hooks.backward_pre.entries(), hooks.backward.entries()});
}

Tensors BackwardHooks::on_inputs(Tensors inputs) {
  if (!state_) return inputs;
  state_->inputs = inputs.size();
  state_->input_has_grad = insert_node(inputs, node_maker<ModuleInputs>(state_));
  return inputs;
}

Tensors BackwardHooks::on_outputs(Tensors outputs) {
  if (state_) insert_node(outputs, node_maker<ModuleOutputs>(state_));
  return outputs;
}

}  // namespace tessera::detail
