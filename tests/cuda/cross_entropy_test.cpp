#include "tessera/cuda/detail/cross_entropy.h"

#include "tests/cuda/losses.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::cuda {
namespace {

TEST(CrossEntropyRows, TheReferenceIsLibTorchsLoss) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const int64_t rows : {0, 1, 5}) expect_as_libtorch(at::kCPU, dtype, rows, 24);
}

}  // namespace
}  // namespace tessera::cuda
