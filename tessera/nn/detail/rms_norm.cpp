#include "tessera/nn/detail/rms_norm.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/rms_norm.h>

#include <ostream>

namespace tessera::nn {

RMSNormImpl::RMSNormImpl(RMSNormOptions options) : options(std::move(options)) { RMSNormImpl::reset(); }

RMSNormImpl::RMSNormImpl(int64_t size, double eps) : options(size) {
  options.eps = eps;
  RMSNormImpl::reset();
}

void RMSNormImpl::reset() {
  weight = register_parameter("weight", options.elementwise_affine ? at::ones(options.normalized_shape) : at::Tensor(),
                              /*requires_grad=*/options.elementwise_affine);
}

void RMSNormImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::RMSNorm(" << at::IntArrayRef(options.normalized_shape);
  if (options.eps) stream << ", eps=" << *options.eps;
  stream << ", elementwise_affine=" << (options.elementwise_affine ? "true" : "false") << ")";
}

at::Tensor RMSNormImpl::forward(const at::Tensor& input) {
  return at::rms_norm(input, options.normalized_shape,
                      weight.defined() ? std::optional<at::Tensor>(weight) : std::nullopt, options.eps);
}

}  // namespace tessera::nn
