#include "tessera/compile/detail/backward/graph.h"

#include "tessera/compile/detail/backward/compiled_node.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <unordered_map>

namespace tessera::compiler {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using namespace torch::dynamo::autograd;

void append(std::string& key, const void* bytes, size_t size) { key.append(static_cast<const char*>(bytes), size); }
void append(std::string& key, int64_t number) { append(key, &number, sizeof number); }

class Reader {
 public:
  explicit Reader(BackwardGraph& graph) : graph_(graph), call_(SizeInput::STATIC) {}

  // In the order in which they are first met; each node once.
  int64_t visit(const torch::autograd::Edge& edge) {
    if (!edge.is_valid()) return -1;
    auto* root = edge.function.get();
    if (const auto found = numbers_.find(root); found != numbers_.end()) return found->second;
    const auto number = static_cast<int64_t>(numbers_.size());
    numbers_.emplace(root, number);
    graph_.nodes.push_back(root);
    read(edge);
    std::string edges;
    for (const auto& next : root->next_edges()) {
      append(edges, visit(next));
      append(edges, next.is_valid() ? static_cast<int64_t>(next.input_nr) : -1);
    }
    append(graph_.key, number);
    graph_.key += edges;
    return number;
  }

  void finish() {
    for (auto& tensor : call_.tensor_args.inputs) graph_.saved.push_back(tensor);
    for (const auto& size : call_.all_size_inputs) append(graph_.key, size.value);
  }

 private:
  void read(const torch::autograd::Edge& edge) {
    auto* node = edge.function.get();
    graph_.key += typeid(*node).name();
    for (uint32_t i = 0; i < node->num_inputs(); i++)
      for (const auto& size : node->input_metadata(i).shape_as_dim_vector())
        append(graph_.key, size.guard_int(__FILE__, __LINE__));
    if (const auto* leaf = dynamic_cast<AccumulateGrad*>(node)) {
      graph_.leaves.push_back(leaf->variable);
      return;
    }
    if (dynamic_cast<DeliverNode*>(node)) return;
    if (const auto* compiled = dynamic_cast<CompiledNode*>(node)) {
      append(graph_.key, reinterpret_cast<int64_t>(compiled->program().get()));
      for (const auto& t : compiled->saved()) call_.tensor_args.add(t);
      return;
    }
    auto& node_call = call_.node_calls.lookup(edge.function);
    CompiledNodeArgs args(call_, node_call);
    node->compiled_args(args);
    const auto key = args.key();
    append(graph_.key, key.key, key.key_size);
  }

  BackwardGraph& graph_;
  AutogradCompilerCall call_;
  std::unordered_map<const Node*, int64_t> numbers_;
};

}  // namespace

BackwardGraph read_graph(const tessera::detail::BackwardCall& call) {
  BackwardGraph graph;
  try {
    Reader reader(graph);
    for (const auto& root : call.roots) append(graph.key, reader.visit(root));
    for (const auto& out : call.outputs) append(graph.key, reader.visit(out));
    append(graph.key, call.accumulate_grad);
    reader.finish();
    for (const auto& t : call.gradients) graph.saved.push_back(t);
  } catch (const c10::Error& error) {
    graph.refused = error.what_without_backtrace();
  }
  return graph;
}

void release(const BackwardGraph& graph) {
  for (auto* node : graph.nodes) node->release_variables();
}

}  // namespace tessera::compiler
