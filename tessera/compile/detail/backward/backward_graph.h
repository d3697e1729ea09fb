#pragma once
#include "tessera/base/visit.h"
#include "tessera/nn/detail/engine.h"

#include <string>
#include <vector>

namespace tessera::compiler {

// An autograd graph, read before its backward runs, as PyTorch's compiled autograd does.
struct BackwardGraph {
  std::string key;  // node types, edges, sizes and constants; graphs with equal keys share a program
  Tensors saved;    // tensors saved by the nodes, then the gradients of the roots
  Tensors leaves;   // tensors whose .grad it adds to
  std::vector<torch::autograd::Node*> nodes;
  std::string unsupported;  // why it cannot be compiled; empty: it can
};
BackwardGraph read_backward_graph(const tessera::detail::BackwardCall& call);

// Frees the saved tensors of all nodes, as a backward without retain_graph does.
void release_saved_tensors(const BackwardGraph& graph);

}  // namespace tessera::compiler
