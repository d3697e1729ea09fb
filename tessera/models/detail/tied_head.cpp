#include "tessera/models/detail/tied_head.h"

#include <ATen/ops/linear.h>

namespace tessera::models {

at::Tensor TiedHeadImpl::forward(const at::Tensor& x, const at::Tensor& weight) { return at::linear(x, weight); }

}  // namespace tessera::models
