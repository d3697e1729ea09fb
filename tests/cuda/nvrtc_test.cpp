// Every kernel compiles for Hopper, on a machine without a GPU too.
#include "tessera/cuda/detail/nvrtc.h"

#include "tessera/base/error.h"
#include "tessera/cuda/detail/cross_entropy_source.h"
#include "tessera/cuda/detail/fused_kernels.h"
#include "tessera/cuda/detail/sum_rows_source.h"
#include "tessera/cuda/detail/transformer_kernels.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

namespace tessera::cuda {
namespace {

class Nvrtc : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!nvrtc_available()) GTEST_SKIP() << "no NVRTC; tools/bootstrap nvrtc installs it";
  }
};

TEST_F(Nvrtc, CompilesAllKernelsForHopper) {
  std::vector<std::string> sources = {kCrossEntropySource, kSumRowsSource, transformer_source()};
  for (const int64_t length : {256, 512, 768, 1024}) sources.push_back(layer_norm_source(length));
  for (const auto& source : sources) EXPECT_GT(compile_to_cubin(source, "sm_90a").size(), 1000u);
}

TEST_F(Nvrtc, AnErrorHasTheCompilersOutput) {
  EXPECT_ERROR(UsageError, compile_to_cubin("__global__ void f() { undeclared = 1; }", "sm_90a"), "undeclared");
}

}  // namespace
}  // namespace tessera::cuda
