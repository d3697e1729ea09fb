// Passes for mixed precision and CUDA, by text.
#include "expect_rewrite.h"

namespace tessera::compiler {
namespace {

TEST(CudaPasses, FoldCasts) {
  expect_rewrite("fold_casts", R"(input %0: bf16[2, 3] argument "0"
input %1: f32[2, 3] argument "1"
%2: bf16[2, 3] = aten.neg(%0)
%3: f32[2, 3] = aten._to_copy(%2, 6, none, none, none, false, none)
%4: f32[2, 3] in %1 = aten.copy_(%1!, %3, false)
return %4
)",
                 R"(input %0: bf16[2, 3] argument "0"
input %1: f32[2, 3] argument "1"
%2: bf16[2, 3] = aten.neg(%0)
%3: f32[2, 3] = aten._to_copy(%2, 6, none, none, none, false, none)
%4: f32[2, 3] in %1 = aten.copy_(%1!, %2, false)
return %4
)");
}

TEST(CudaPasses, FoldCastsKeepsACastOfWhatIsWrittenLater) {
  EXPECT_EQ(matches("fold_casts", R"(input %0: bf16[3] argument "0"
input %1: f32[3] argument "1"
%2: f32[3] = aten._to_copy(%0, 6, none, none, none, false, none)
%3: bf16[3] in %0 = aten.zero_(%0!)
%4: f32[3] in %1 = aten.copy_(%1!, %2, false)
return %4
)"),
            0);
}

TEST(CudaPasses, FoldCastsKeepsARounding) {  // to bfloat16 and back is not a copy
  EXPECT_EQ(matches("fold_casts", R"(input %0: f32[3] argument "0"
input %1: f32[3] argument "1"
%2: f32[3] = aten.neg(%0)
%3: bf16[3] = aten._to_copy(%2, 15, none, none, none, false, none)
%4: f32[3] in %1 = aten.copy_(%1!, %3, false)
return %4
)"),
            0);
}

const char* const kBiased = R"(input %0: bf16[6, 4] cuda:0 argument "0"
input %1: bf16[4, 8] cuda:0 parameter "weight"
input %2: bf16[16] cuda:0 parameter "biases"
%3: bf16[6, 8] cuda:0 = aten.mm(%0, %1)
%4: bf16[2, 3, 8] cuda:0 in %3 = aten._unsafe_view(%3, [2, 3, 8])
%5: bf16[8] cuda:0 in %2 + 8 = aten.as_strided(%2, [8], [1], 8)
%6: bf16[2, 3, 8] cuda:0 in %3 = aten.add_.Tensor(%4!, %5, 1)
%7: bf16[2, 3, 8] cuda:0 = aten.relu(%6)
return %7
)";

TEST(CudaPasses, FuseBias) {
  expect_rewrite("fuse_bias", kBiased, R"(input %0: bf16[6, 4] cuda:0 argument "0"
input %1: bf16[4, 8] cuda:0 parameter "weight"
input %2: bf16[16] cuda:0 parameter "biases"
%3: bf16[8] cuda:0 in %2 + 8 = aten.as_strided(%2, [8], [1], 8)
%4: bf16[6, 8] cuda:0 = aten.addmm(%3, %0, %1, 1, 1)
%5: bf16[2, 3, 8] cuda:0 in %4 = aten._unsafe_view(%4, [2, 3, 8])
%6: bf16[2, 3, 8] cuda:0 = aten.relu(%5)
return %6
)");
}

TEST(CudaPasses, FuseBiasKeepsAProductThatIsRead) {
  std::string text = kBiased;
  const auto at = text.find("%6:");
  text.insert(at, "%9: bf16[6, 8] cuda:0 = aten.relu(%3)\n");
  EXPECT_EQ(matches("fuse_bias", text), 0);
}

TEST(CudaPasses, FuseBiasIsForCudaOnly) {
  std::string text = kBiased;
  for (size_t at = text.find(" cuda:0"); at != std::string::npos; at = text.find(" cuda:0")) text.erase(at, 7);
  EXPECT_EQ(matches("fuse_bias", text), 0);
}

const char* const kGelu = R"(input %0: bf16[8, 16] cuda:0 argument "0"
input %1: bf16[16, 24] cuda:0 parameter "up"
input %2: bf16[24] cuda:0 parameter "bias"
input %3: bf16[8, 16] cuda:0 argument "1"
input %4: bf16[16, 24] cuda:0 parameter "down"
%5: bf16[8, 24] cuda:0 = aten.addmm(%2, %0, %1, 1, 1)
%6: bf16[2, 4, 24] cuda:0 in %5 = aten._unsafe_view(%5, [2, 4, 24])
%7: bf16[2, 4, 24] cuda:0 = aten.gelu(%6, "tanh")
%8: bf16[8, 24] cuda:0 = aten.mm(%3, %4)
%9: bf16[2, 4, 24] cuda:0 in %8 = aten._unsafe_view(%8, [2, 4, 24])
%10: bf16[2, 4, 24] cuda:0 = aten.gelu_backward(%9, %6, "tanh")
%11: bf16[8, 24] cuda:0 in %10 = aten.view(%10, [8, 24])
%12: bf16[1, 24] cuda:0 = aten.sum.dim_IntList(%11, [0], true, none)
return %7
return %11
return %12
)";

TEST(CudaPasses, CublasEpilogues) {
  expect_rewrite("cublas_epilogues", kGelu, R"(input %0: bf16[8, 16] cuda:0 argument "0"
input %1: bf16[16, 24] cuda:0 parameter "up"
input %2: bf16[24] cuda:0 parameter "bias"
input %3: bf16[8, 16] cuda:0 argument "1"
input %4: bf16[16, 24] cuda:0 parameter "down"
%5: bf16[2, 4, 24] cuda:0 = aten.empty_strided([2, 4, 24], [96, 24, 1], 15, none, device("cuda:0"), none)
%6: bf16[8, 24] cuda:0 = aten.empty_strided([8, 24], [24, 1], 15, none, device("cuda:0"), none)
tessera.cuda_kernel([%5!, %6!], [%0, %1, %2], [], "matmul_gelu")
%7: bf16[2, 4, 24] cuda:0 in %6 = aten._unsafe_view(%6, [2, 4, 24])
%8: bf16[8, 24] cuda:0 = aten.empty_strided([8, 24], [24, 1], 15, none, device("cuda:0"), none)
tessera.cuda_kernel([%8!], [%3, %4, %7], [], "matmul_gelu_grad")
%9: bf16[2, 4, 24] cuda:0 in %8 = aten._unsafe_view(%8, [2, 4, 24])
%10: bf16[8, 24] cuda:0 in %8 = aten.view(%9, [8, 24])
%11: bf16[1, 24] cuda:0 = aten.sum.dim_IntList(%10, [0], true, none)
return %5
return %10
return %11
)");
}

// The product keeps its memory if the derivative cannot have it, and gelu stays if the product changes before.
TEST(CudaPasses, CublasEpiloguesKeepWhatIsUsedOtherwise) {
  std::string read = kGelu;
  read.insert(read.find("%10:"), "%13: bf16[8, 24] cuda:0 = aten.relu(%8)\n");
  EXPECT_EQ(rewritten("cublas_epilogues", read).find("matmul_gelu_grad"), std::string::npos);
  std::string written = kGelu;
  written.insert(written.find("%7:"), "%13: bf16[8, 24] cuda:0 in %5 = aten.zero_(%5!)\n");
  EXPECT_EQ(rewritten("cublas_epilogues", written).find("\"matmul_gelu\""), std::string::npos);
  std::string exact = kGelu;
  for (size_t at = exact.find("tanh"); at != std::string::npos; at = exact.find("tanh")) exact.replace(at, 4, "none");
  EXPECT_EQ(rewritten("cublas_epilogues", exact).find("gelu_grad"), std::string::npos);
}

}  // namespace
}  // namespace tessera::compiler
