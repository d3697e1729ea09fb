#pragma once
#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::detail {

// `value` laid out as `like` is: a piece of it, redistributed, or whole; `value` itself where that already holds. dtype
// is kept, and device too if `like` is plain. Communicates only if `value` is distributed, and lies otherwise.
// Requires: the sizes are equal, and why_no_fit(value, like) is "".
at::Tensor fit_value(const at::Tensor& value, const at::Tensor& like);

// "" or why not: a value on meta has nothing to load, and a Partial tensor cannot be loaded into.
std::string why_no_fit(const at::Tensor& value, const at::Tensor& like);

}  // namespace tessera::detail
