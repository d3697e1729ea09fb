#include "tessera/pipelining/detail/split_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace tessera::pipelining {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using Tensors = std::vector<at::Tensor>;

// The autograd graph from the outputs, with its edges turned around.
class ReverseGraph {
 public:
  explicit ReverseGraph(const edge_list& roots) {
    std::vector<Edge> open(roots.begin(), roots.end());
    while (!open.empty()) {
      const Edge edge = open.back();
      open.pop_back();
      Node* node = edge.function.get();
      if (!edges_.emplace(node, edge).second) continue;
      for (const Edge& next : node->next_edges()) {
        if (!next.is_valid()) continue;
        users_[next.function.get()].push_back(node);
        open.push_back(next);
      }
    }
  }

  // All nodes from which `starts` can be reached, `starts` included.
  std::unordered_set<Node*> reaching(const edge_list& starts) const {
    std::unordered_set<Node*> found;
    std::vector<Node*> open;
    for (const Edge& start : starts)
      if (edges_.contains(start.function.get())) open.push_back(start.function.get());
    while (!open.empty()) {
      Node* node = open.back();
      open.pop_back();
      if (found.insert(node).second) std::ranges::copy(users(node), std::back_inserter(open));
    }
    return found;
  }

  // The first nodes of `closure` on the ways from `start` to the outputs.
  std::vector<Node*> boundaries(const Edge& start, const std::unordered_set<Node*>& closure) const {
    std::vector<Node*> found;
    std::unordered_set<Node*> seen;
    std::vector<Node*> open = {start.function.get()};
    while (!open.empty()) {
      Node* node = open.back();
      open.pop_back();
      if (!seen.insert(node).second) continue;
      if (closure.contains(node))
        found.push_back(node);
      else
        std::ranges::copy(users(node), std::back_inserter(open));
    }
    return found;
  }

  bool contains(const Edge& edge) const { return edges_.contains(edge.function.get()); }
  Edge edge_to(Node* node, uint32_t input) const { return {edges_.at(node).function, input}; }

 private:
  const std::vector<Node*>& users(Node* node) const {
    static const std::vector<Node*> none;
    const auto found = users_.find(node);
    return found == users_.end() ? none : found->second;
  }

  std::unordered_map<Node*, Edge> edges_;
  std::unordered_map<Node*, std::vector<Node*>> users_;
};

edge_list edges_of(const Tensors& tensors) {
  edge_list edges;
  for (const at::Tensor& tensor : tensors)
    if (tensor.defined() && tensor.requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(tensor));
  return edges;
}

// Where a backward starts: outputs that have a graph and a gradient.
struct BackwardRoots {
  edge_list edges;
  Tensors gradients;
};
BackwardRoots roots_of(const Tensors& outputs, const Tensors& gradients) {
  BackwardRoots roots;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad() || !gradients[i].defined()) continue;
    roots.edges.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
    roots.gradients.push_back(gradients[i]);
  }
  return roots;
}

Tensors run_engine(const edge_list& roots, const Tensors& gradients, const edge_list& targets, bool keep_graph,
                   bool accumulate) {
  return torch::autograd::Engine::get_default_engine().execute(roots, gradients, keep_graph, /*create_graph=*/false,
                                                               accumulate, targets);
}

}  // namespace

Tensors backward_input(const Tensors& outputs, const Tensors& gradients, const Tensors& inputs,
                       const Tensors& parameters, WeightBackward& weights) {
  const auto [roots, root_gradients] = roots_of(outputs, gradients);
  weights = {};
  const ReverseGraph graph(roots);
  edge_list parameter_edges = edges_of(parameters);
  std::erase_if(parameter_edges, [&](const Edge& edge) { return !graph.contains(edge); });

  // Inputs that the outputs depend on.
  edge_list targets;
  std::vector<size_t> target_inputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
    const Edge edge = torch::autograd::impl::gradient_edge(inputs[i]);
    if (!graph.contains(edge)) continue;
    targets.push_back(edge);
    target_inputs.push_back(i);
  }
  Tensors input_gradients(inputs.size());
  if (targets.empty()) {
    if (!parameter_edges.empty()) weights.passes_.push_back({roots, root_gradients, parameter_edges});
    return input_gradients;
  }

  // Parameters by their boundary. Those with several boundaries get their gradients now.
  const std::unordered_set<Node*> closure = graph.reaching(targets);
  std::vector<Node*> boundaries;  // in the order of the parameters
  std::unordered_map<Node*, edge_list> parameters_of;
  edge_list early;
  for (const Edge& parameter : parameter_edges) {
    const std::vector<Node*> found = graph.boundaries(parameter, closure);
    if (found.size() != 1) {
      early.push_back(parameter);
      continue;
    }
    edge_list& group = parameters_of[found[0]];
    if (group.empty()) boundaries.push_back(found[0]);
    group.push_back(parameter);
  }
  targets.insert(targets.end(), early.begin(), early.end());
  for (Node* boundary : boundaries)
    for (uint32_t i = 0; i < boundary->num_inputs(); ++i) targets.push_back(graph.edge_to(boundary, i));

  const Tensors found = run_engine(roots, root_gradients, targets, /*keep_graph=*/true, /*accumulate=*/false);
  size_t next = 0;
  for (const size_t i : target_inputs) input_gradients[i] = found[next++];
  for (const Edge& parameter : early) {
    if (found[next].defined()) weights.passes_.push_back({{parameter}, {found[next]}, {parameter}});
    ++next;
  }
  for (Node* boundary : boundaries) {
    WeightBackward::Pass pass;
    for (uint32_t i = 0; i < boundary->num_inputs(); ++i, ++next) {
      if (!found[next].defined()) continue;
      pass.roots.push_back(graph.edge_to(boundary, i));
      pass.gradients.push_back(found[next]);
    }
    pass.parameters = parameters_of[boundary];
    if (!pass.roots.empty()) weights.passes_.push_back(std::move(pass));
  }
  return input_gradients;
}

Tensors full_backward(const Tensors& outputs, const Tensors& gradients, const Tensors& inputs) {
  const auto [roots, root_gradients] = roots_of(outputs, gradients);
  if (!roots.empty()) run_engine(roots, root_gradients, {}, /*keep_graph=*/false, /*accumulate=*/true);
  Tensors found;
  for (const at::Tensor& input : inputs) found.push_back(input.defined() ? input.grad() : at::Tensor());
  return found;
}

void WeightBackward::run() {
  for (const Pass& pass : std::exchange(passes_, {}))
    run_engine(pass.roots, pass.gradients, pass.parameters, /*keep_graph=*/false, /*accumulate=*/true);
}

}  // namespace tessera::pipelining
