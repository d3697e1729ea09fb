#pragma once
#include "tessera/base/visit.h"
#include "tessera/nn/detail/engine.h"

#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler {

// What a backward depends on, read off its graph before it runs.
struct BackwardGraph {
  std::string key;  // which nodes, how connected, with which constants
  Tensors saved;    // what nodes have saved, and the gradients that flow in
  Tensors leaves;   // whose .grad it adds to
  std::vector<torch::autograd::Node*> nodes;
  std::string refused;  // why it cannot be compiled; "": it can
};
BackwardGraph read_graph(const tessera::detail::BackwardCall& call);

// Lets go of what the nodes have saved, as a backward does that does not keep its graph.
void release(const BackwardGraph& graph);

}  // namespace tessera::compiler
