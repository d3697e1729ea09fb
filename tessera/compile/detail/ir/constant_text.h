#pragma once
#include "tessera/compile/detail/ir/type.h"

#include <optional>
#include <vector>

// Constants of few elements are printed in a program's text: constant "0" = [0.0, 2.0, 4.0]
namespace tessera::compiler {

constexpr int64_t kMostExactInteger = (int64_t{1} << 53) - 1;  // a double has all integers up to this one

// The elements in row-major order; none if there are more than 16, if they are complex, or if a double does not have
// one of them exactly (large integers).
std::optional<std::vector<double>> elements_of(const at::Tensor& constant);
// Requires: as many elements as the type has.
at::Tensor constant_of(const Type& type, const std::vector<double>& elements);

}  // namespace tessera::compiler
