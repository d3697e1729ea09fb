// Random fills on a GPU have the bits of those on the CPU.
#include "tessera/cuda/detail/nvrtc.h"
#include "tessera/dtensor/detail/distributions.h"
#include "tessera/dtensor/detail/random_fill_cuda.h"
#include "tessera/dtensor/detail/random_ops.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::random_ops {
namespace {

template <class Distribution>
void expect_compiles() {
  const auto name = c10::demangle(typeid(Distribution).name());
  EXPECT_GT(cuda::compile_to_cubin(fill_source(name), "sm_90a", cuda::Rounding::Separate).size(), 1000u) << name;
}

template <class T>
void expect_floating_fills_compile() {
  expect_compiles<philox::Uniform<T>>();
  expect_compiles<philox::Normal<T>>();
  expect_compiles<philox::LogNormal<T>>();
  expect_compiles<philox::Exponential<T>>();
  expect_compiles<philox::Cauchy<T>>();
}

TEST(RandomFill, AllCompileForHopper) {
  if (!cuda::nvrtc_available()) GTEST_SKIP() << "no NVRTC; tools/bootstrap nvrtc installs it";
  expect_floating_fills_compile<float>();
  expect_floating_fills_compile<double>();
  expect_floating_fills_compile<c10::BFloat16>();
  expect_compiles<philox::Uniform<c10::Half>>();
  expect_compiles<philox::Geometric<int64_t>>();
  expect_compiles<philox::Bernoulli<bool>>();
  expect_compiles<philox::Bernoulli<c10::Half>>();
  expect_compiles<philox::Integer32<uint8_t>>();
  expect_compiles<philox::Integer64<int64_t>>();
}

struct NamedFill {
  const char* name;
  void (*run)(at::Tensor& t, const Draw& draw);
  std::vector<at::ScalarType> dtypes;
};

TEST(RandomFill, TheGpuHasTheBitsOfTheCpu) {
  if (!can_fill_on(at::Device(at::kCUDA, 0))) GTEST_SKIP() << "no CUDA device on this machine, or a build without CUDA";
  const std::vector<at::ScalarType> floating = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  const std::vector<NamedFill> fills = {
      {"uniform", [](auto& t, const auto& d) { uniform_(t, -1, 3, d); }, floating},
      {"normal", [](auto& t, const auto& d) { normal_(t, 0.5, 2, d); }, floating},
      {"log_normal", [](auto& t, const auto& d) { log_normal_(t, 0.5, 2, d); }, floating},
      {"exponential", [](auto& t, const auto& d) { exponential_(t, 1.5, d); }, floating},
      {"cauchy", [](auto& t, const auto& d) { cauchy_(t, 0.5, 2, d); }, floating},
      {"geometric", [](auto& t, const auto& d) { geometric_(t, 0.01, d); }, {at::kFloat, at::kLong}},
      {"bernoulli", [](auto& t, const auto& d) { bernoulli_(t, 0.3, d); }, {at::kBool, at::kFloat, at::kBFloat16}},
      {"short integers", [](auto& t, const auto& d) { integers_(t, -7, 100, d); }, {at::kInt, at::kChar, at::kHalf}},
      {"long integers", [](auto& t, const auto& d) { integers_(t, 1, int64_t{1} << 40, d); }, {at::kLong}},
      {"all integers", [](auto& t, const auto& d) { integers_(t, 0, 0, d); }, {at::kLong}},
  };
  // Global sizes, and what a rank has of them: all, a range of rows, columns, ranges of both, one part of a large
  // tensor.
  const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> shards = {
      {{7, 33}, {}},
      {{7, 33}, {1, 2, 5, 1, 0, 33}},
      {{7, 33}, {1, 0, 7, 1, 11, 22}},
      {{7, 33}, {2, 0, 2, 5, 7, 2, 1, 3, 30, 33}},
      {{3, 500'000}, {1, 1, 3, 1, 0, 500'000}},
  };
  for (const auto& fill : fills)
    for (const auto dtype : fill.dtypes)
      for (const auto& [sizes, ranges] : shards) {
        SCOPED_TRACE(c10::str(fill.name, " of ", dtype, ", sizes ", sizes, ", ranges ", ranges));
        const Draw draw{11, 5, sizes, ranges};
        const auto numel = LocalIndices(sizes, ranges).numel();
        auto cpu = torch::empty({numel}, dtype), gpu = torch::empty({numel}, at::device(at::kCUDA).dtype(dtype));
        fill.run(cpu, draw);
        fill.run(gpu, draw);
        EXPECT_TRUE(at::equal(gpu.cpu(), cpu))
            << "of " << numel << " elements differ " << gpu.cpu().ne(cpu).sum().item<int64_t>();
      }
}

}  // namespace
}  // namespace tessera::random_ops
