#include "tessera/nn/grad_hooks.h"

#include "tessera/base/detail/libtorch_autograd_compat.h"
#include "tessera/base/error.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <map>
#include <mutex>

namespace tessera {
namespace {

using torch::autograd::Node;

// True if the running backward will run this node. With inputs= (autograd::grad) the engine has a list of the nodes
// that it runs. Otherwise it runs all nodes that it reached.
bool will_run(Node* node) {
  const auto* needed = torch::autograd::get_current_graph_task_exec_info();
  if (!needed || needed->empty()) {
    const auto* reached = torch::autograd::get_current_graph_task_nodes_in_graph();
    return reached && reached->count(node) != 0;
  }
  const auto found = needed->find(node);
  return found != needed->end() && found->second.should_execute();
}

struct MultiGrad {
  std::function<void(const Tensors&)> hook;
  std::vector<torch::autograd::Edge> edges;  // one per tensor: the node that computes or accumulates its gradient
  struct Received {
    size_t expected = 0, count = 0;
    Tensors gradients;
  };
  std::mutex mutex;
  std::map<int, Received> by_backward;  // the key is the graph task id

  void receive(size_t index, const at::Tensor& gradient) {
    Tensors all;
    {
      std::lock_guard lock(mutex);
      const int task = torch::autograd::get_current_graph_task_id();
      auto [found, first] = by_backward.try_emplace(task);
      auto& received = found->second;
      if (first) {
        received.gradients.resize(edges.size());
        for (const auto& edge : edges) received.expected += will_run(edge.function.get());
      }
      received.gradients[index] = gradient;
      if (++received.count < received.expected) return;
      all = std::move(received.gradients);
      by_backward.erase(found);
    }
    hook(all);
  }
};

struct AnyGrad {
  std::function<void(const Tensors&)> hook;
  std::mutex mutex;
  int last_task = -1;

  void receive(const at::Tensor& gradient) {
    {
      std::lock_guard lock(mutex);
      if (std::exchange(last_task, torch::autograd::get_current_graph_task_id()) ==
          torch::autograd::get_current_graph_task_id())
        return;
    }
    hook({gradient});
  }
};

GradHookHandle handle_for(std::vector<std::pair<at::Tensor, unsigned>> registered) {
  return GradHookHandle([registered = std::move(registered)] {
    for (const auto& [tensor, at] : registered) tensor.remove_hook(at);
  });
}

struct PostAccumulateList final : torch::autograd::PostAccumulateGradHook {
  std::map<uint64_t, std::function<void(const at::Tensor&)>> hooks;
  uint64_t last = 0;
  std::unique_ptr<PostAccumulateGradHook> before;  // the hook that other code had set; runs first

  void operator()(const at::Tensor& leaf) override {
    if (before) (*before)(leaf);
    const auto now = hooks;  // a hook may remove itself
    for (const auto& [id, hook] : now) hook(leaf);
  }
};

PostAccumulateList& list_of(const at::Tensor& leaf) {
  auto& slot = torch::autograd::impl::post_acc_grad_hooks(leaf);
  if (auto* list = dynamic_cast<PostAccumulateList*>(slot.get())) return *list;
  auto made = std::make_unique<PostAccumulateList>();
  auto& list = *made;
  list.before = std::move(slot);
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::move(made));
  return list;
}

}  // namespace

GradHookHandle register_multi_grad_hook(const Tensors& tensors, std::function<void(const Tensors&)> hook,
                                        MultiGradMode mode) {
  for (size_t i = 0; i < tensors.size(); i++)
    TESSERA_CHECK(tensors[i].defined() && tensors[i].requires_grad(), UsageError, "register_multi_grad_hook: tensor ",
                  i, " of ", tensors.size(), " does not require a gradient");
  std::vector<std::pair<at::Tensor, unsigned>> registered;
  if (mode == MultiGradMode::Any) {
    auto state = std::make_shared<AnyGrad>();
    state->hook = std::move(hook);
    for (const auto& t : tensors)
      registered.emplace_back(t, t.register_hook([state](const at::Tensor& grad) { state->receive(grad); }));
    return handle_for(std::move(registered));
  }
  auto state = std::make_shared<MultiGrad>();
  state->hook = std::move(hook);
  for (const auto& t : tensors) state->edges.push_back(torch::autograd::impl::gradient_edge(t));
  for (size_t i = 0; i < tensors.size(); i++)
    registered.emplace_back(tensors[i],
                            tensors[i].register_hook([state, i](const at::Tensor& grad) { state->receive(i, grad); }));
  return handle_for(std::move(registered));
}

GradHookHandle register_post_accumulate_grad_hook(const at::Tensor& leaf, std::function<void(const at::Tensor&)> hook) {
  TESSERA_CHECK(leaf.defined() && leaf.requires_grad() && leaf.is_leaf(), UsageError,
                "register_post_accumulate_grad_hook: the tensor must be a leaf that requires a gradient");
  auto& list = list_of(leaf);
  const auto id = ++list.last;
  list.hooks.emplace(id, std::move(hook));
  return GradHookHandle([leaf, id] { list_of(leaf).hooks.erase(id); });
}

bool will_accumulate(const at::Tensor& leaf) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(leaf);
  return accumulator && will_run(accumulator.get());
}

}  // namespace tessera
