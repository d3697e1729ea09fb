#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <optional>

// The forms of an op that compute the same: into memory of its own, or into its first argument.
//   aten.mul.Tensor <-> aten.mul_.Tensor        aten._foreach_mul.Scalar <-> aten._foreach_mul_.Scalar
namespace tessera::compiler {

std::optional<c10::OperatorHandle> in_place_form(const c10::OperatorHandle& op);
std::optional<c10::OperatorHandle> functional_form(const c10::OperatorHandle& op);

bool is_pointwise(const c10::OperatorHandle& op);  // element i of the result depends on elements i alone

// The types of what an op would give, with the node's arguments: LibTorch is asked, with tensors that have no data, or
// where it has no answer and the op is pointwise, with one element. None if it cannot say; results that are no tensors
// are left out.
std::optional<std::vector<Type>> result_types(const Program& program, const Node& node);

}  // namespace tessera::compiler
