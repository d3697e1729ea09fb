#pragma once
#include "tessera/compile/detail/ir/type.h"

#include <optional>
#include <vector>

// Short constants are part of a program's text: constant "0" = [0.0, 2.0, 4.0]
namespace tessera::compiler {

// In order; none if there are many, or they are no real numbers.
std::optional<std::vector<double>> elements_of(const at::Tensor& constant);
at::Tensor constant_of(const Type& type, const std::vector<double>& elements);  // as many as the type has

}  // namespace tessera::compiler
