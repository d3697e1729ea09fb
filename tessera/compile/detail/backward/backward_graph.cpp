#include "tessera/compile/detail/backward/backward_graph.h"

#include "tessera/compile/detail/backward/compiled_node.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <unordered_map>

namespace tessera::compiler {
namespace {

namespace compiled_autograd = torch::dynamo::autograd;

void append_bytes(std::string& key, const void* bytes, size_t size) {
  key.append(static_cast<const char*>(bytes), size);
}
void append_number(std::string& key, int64_t number) { append_bytes(key, &number, sizeof number); }

class BackwardGraphReader {
 public:
  explicit BackwardGraphReader(BackwardGraph& graph) : graph_(graph), call_(compiled_autograd::SizeInput::STATIC) {}

  // Depth first, each node once. Returns the index of the node, or -1 if the edge is not valid.
  int64_t visit(const torch::autograd::Edge& edge) {
    if (!edge.is_valid()) return -1;
    auto* root = edge.function.get();
    if (const auto found = indices_.find(root); found != indices_.end()) return found->second;
    const auto index = static_cast<int64_t>(indices_.size());
    indices_.emplace(root, index);
    graph_.nodes.push_back(root);
    read(edge);
    std::string edges;
    for (const auto& next : root->next_edges()) {
      append_number(edges, visit(next));
      append_number(edges, next.is_valid() ? static_cast<int64_t>(next.input_nr) : -1);
    }
    append_number(graph_.key, index);
    graph_.key += edges;
    return index;
  }

  void finish() {
    for (auto& tensor : call_.tensor_args.inputs) graph_.saved.push_back(tensor);
    for (const auto& size : call_.all_size_inputs) append_number(graph_.key, size.value);
  }

 private:
  void read(const torch::autograd::Edge& edge) {
    auto* node = edge.function.get();
    graph_.key += typeid(*node).name();
    for (uint32_t i = 0; i < node->num_inputs(); i++)
      for (const auto& size : node->input_metadata(i).shape_as_dim_vector())
        append_number(graph_.key, size.guard_int(__FILE__, __LINE__));
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      graph_.leaves.push_back(leaf->variable);
      return;
    }
    if (dynamic_cast<DeliverNode*>(node)) return;
    if (const auto* compiled = dynamic_cast<CompiledNode*>(node)) {
      append_number(graph_.key, reinterpret_cast<int64_t>(compiled->program().get()));
      append_bytes(graph_.key, compiled->numbers().data(), compiled->numbers().size() * sizeof(double));
      for (const auto& t : compiled->saved()) call_.tensor_args.add(t);
      return;
    }
    auto& node_call = call_.node_calls.lookup(edge.function);
    compiled_autograd::CompiledNodeArgs args(call_, node_call);
    node->compiled_args(args);
    const auto key = args.key();
    append_bytes(graph_.key, key.key, key.key_size);
  }

  BackwardGraph& graph_;
  compiled_autograd::AutogradCompilerCall call_;
  std::unordered_map<const torch::autograd::Node*, int64_t> indices_;
};

}  // namespace

BackwardGraph read_backward_graph(const tessera::detail::BackwardCall& call) {
  BackwardGraph graph;
  try {
    BackwardGraphReader reader(graph);
    for (const auto& root : call.roots) append_number(graph.key, reader.visit(root));
    for (const auto& out : call.outputs) append_number(graph.key, reader.visit(out));
    append_number(graph.key, call.accumulate_grad);
    reader.finish();
    for (const auto& t : call.gradients) graph.saved.push_back(t);
  } catch (const c10::Error& error) {
    graph.unsupported = error.what_without_backtrace();
  }
  return graph;
}

void release_saved_tensors(const BackwardGraph& graph) {
  for (auto* node : graph.nodes) node->release_variables();
}

}  // namespace tessera::compiler
