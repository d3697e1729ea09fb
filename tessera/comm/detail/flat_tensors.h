#pragma once
#include "tessera/base/error.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>

#include <vector>

// Lists of tensors as one flat buffer (PyTorch: torch/csrc/utils/tensor_flatten.h).
namespace tessera::comm::detail {

inline int64_t bytes_of(const at::Tensor& x) { return static_cast<int64_t>(x.nbytes()); }
inline int64_t bytes_of(const std::vector<at::Tensor>& xs) {
  int64_t total = 0;
  for (const auto& x : xs) total += bytes_of(x);
  return total;
}

// The bytes of a contiguous tensor as a flat one with the same memory; those of another tensor as a copy. A tensor of
// one element is contiguous with any stride, and view() keeps the stride.
inline at::Tensor as_bytes(const at::Tensor& x) {
  const auto flat = x.contiguous().view({-1});
  return (flat.stride(0) == 1 ? flat : flat.as_strided(flat.sizes(), {1})).view(at::kByte);
}

inline void check_same_dtype(const char* what, const std::vector<at::Tensor>& xs) {
  for (const auto& x : xs)
    TESSERA_CHECK(x.scalar_type() == xs[0].scalar_type(), UsageError, what, " of ", xs[0].scalar_type(), " and ",
                  x.scalar_type(), " tensors together; give one list for each dtype");
}

// The elements of all tensors, concatenated.
inline at::Tensor flatten(const std::vector<at::Tensor>& xs) {
  std::vector<at::Tensor> flat;
  flat.reserve(xs.size());
  for (const auto& x : xs) flat.push_back(x.reshape({-1}));
  return at::cat(flat);
}

// Copies consecutive elements of `flat` into the tensors.
inline void unflatten_into(const std::vector<at::Tensor>& xs, const at::Tensor& flat) {
  int64_t offset = 0;
  for (const auto& x : xs) {
    x.copy_(flat.narrow(0, offset, x.numel()).view(x.sizes()));
    offset += x.numel();
  }
}

}  // namespace tessera::comm::detail
