#pragma once
#include <ATen/core/stack.h>

#include <cstdint>
#include <map>
#include <string>

// Ops that sum, under Numerics::Invariant. Each is either a sum over one dim in the order of sum_tree.h (a primitive),
// or a sequence of such sums, elementwise ops and views. The code is the same for plain tensors and DTensors.
namespace tessera::numerics {

// How a rewrite treats DTensors.
enum class RewriteKind : uint8_t {
  Primitive,  // a sum over one dim, of which ranks can have shards
  Sequence,   // calls other ops on the DTensors
  Local,      // the sharding rule shards no summed dim; the rewrite runs on local tensors
  // Backward of a norm: the gradient of the input is Local, those of weight and bias are sums over rows, a Sequence.
  NormBackward,
};

struct OpRewrite {
  // Replaces the `count` arguments on top of the stack by the results.
  void (*run)(torch::jit::Stack* stack, size_t count);
  RewriteKind kind;
};

// Whether a call on DTensors runs its rewrite on local tensors. `count` arguments are on top of the stack.
bool runs_on_local_tensors(const OpRewrite& rewrite, const torch::jit::Stack& stack, size_t count);

// By name: "aten::mm".
const std::map<std::string, OpRewrite>& op_rewrites();

}  // namespace tessera::numerics
