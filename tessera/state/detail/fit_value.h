#pragma once
#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::detail {

// Converts `value` to the placements of `like`: slices it, redistributes it, or returns its full tensor. Returns
// `value` itself if the placements are equal. Keeps the dtype, and the device if `like` is plain. Communicates only if
// `value` is distributed with other placements.
// Requires: the sizes are equal, and why_no_fit(value, like) is "".
at::Tensor fit_value(const at::Tensor& value, const at::Tensor& like);

// Why `value` cannot be loaded into `like`: `value` is on the meta device, or `like` is Partial. "" if it can.
std::string why_no_fit(const at::Tensor& value, const at::Tensor& like);

}  // namespace tessera::detail
