#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <optional>

// The functional and the in-place variant of an op.
//   aten.mul.Tensor <-> aten.mul_.Tensor        aten._foreach_mul.Scalar <-> aten._foreach_mul_.Scalar
namespace tessera::compiler {

// None if the op has no such variant with the same arguments.
std::optional<c10::OperatorHandle> in_place_variant(const c10::OperatorHandle& op);
std::optional<c10::OperatorHandle> functional_variant(const c10::OperatorHandle& op);

// True if element i of the result depends only on elements i of the arguments.
bool is_pointwise(const c10::OperatorHandle& op);

// Infers the types of an op's tensor results from the node's arguments. Runs the op on meta tensors; if it has no meta
// kernel and is pointwise, runs it on one element. None if both fail.
std::optional<std::vector<Type>> result_types(const Program& program, const Node& node);

}  // namespace tessera::compiler
