#pragma once
#include "tessera/nn/holder.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::nn {

// Options of RMSNorm, with PyTorch's names.
struct RMSNormOptions {
  RMSNormOptions(std::vector<int64_t> normalized_shape) : normalized_shape(std::move(normalized_shape)) {}  // NOLINT
  RMSNormOptions(int64_t size) : normalized_shape{size} {}                                                  // NOLINT

  std::vector<int64_t> normalized_shape;
  std::optional<double> eps;  // nullopt: the epsilon of the dtype, as in torch.nn.RMSNorm
  bool elementwise_affine = true;
};

// torch.nn.RMSNorm, which LibTorch does not have in C++: x / sqrt(mean(x^2) + eps) * weight, over the last dims.
// Example:  nn::RMSNorm norm(config.dim, 1e-5);
class RMSNormImpl : public torch::nn::Cloneable<RMSNormImpl> {
 public:
  explicit RMSNormImpl(RMSNormOptions options);
  RMSNormImpl(int64_t size, double eps);
  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  at::Tensor forward(const at::Tensor& input);

  RMSNormOptions options;
  at::Tensor weight;
};
TESSERA_MODULE(RMSNorm);

}  // namespace tessera::nn
