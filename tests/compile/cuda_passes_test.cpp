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

}  // namespace
}  // namespace tessera::compiler
