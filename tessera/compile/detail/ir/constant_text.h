#pragma once
#include "tessera/compile/detail/ir/type.h"

#include <optional>
#include <vector>

// Constants of few elements are printed in a program's text: constant "0" = [0.0, 2.0, 4.0]
namespace tessera::compiler {

// The elements in row-major order; none if there are more than 16 or if they are complex.
std::optional<std::vector<double>> elements_of(const at::Tensor& constant);
// Requires: as many elements as the type has.
at::Tensor constant_of(const Type& type, const std::vector<double>& elements);

}  // namespace tessera::compiler
