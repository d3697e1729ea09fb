// Passes that change where values are stored, each by text: the program before and after.
#include "expect_rewrite.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

namespace tessera::compiler {
namespace {

// relu_ and mul_ mutate a temporary and become functional. %0 is an input: its mutation stays.
TEST(Functionalise, MutationsOfTemporaries) {
  expect_rewrite("functionalise", R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[2, 2] in %1 = aten.view(%1, [2, 2])
%3: f32[2, 2] = aten.exp(%2)
%4: f32[4] in %1 = aten.relu_(%1!)
%5: f32[4] in %1 = aten.mul_.Tensor(%1!, 2)
%6: f32[2, 2] in %1 = aten.view(%1, [2, 2])
%7: f32[4] in %0 = aten.add_.Tensor(%0!, %5, 1)
return %6
return %3
)",
                 R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[2, 2] in %1 = aten.view(%1, [2, 2])
%3: f32[2, 2] = aten.exp(%2)
%4: f32[4] = aten.relu(%1)
%5: f32[4] = aten.mul.Tensor(%4, 2)
%6: f32[2, 2] in %5 = aten.view(%5, [2, 2])
%7: f32[4] in %0 = aten.add_.Tensor(%0!, %5, 1)
return %6
return %3
)");
}

TEST(Functionalise, CopyIsReplacedByItsSource) {
  expect_rewrite("functionalise", R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.empty.memory_format([4], 6, none, device("cpu"), none, none)
%2: f32[4] = aten.neg(%0)
%3: f32[4] in %1 = aten.copy_(%1!, %2, false)
%4: f32[2, 2] in %1 = aten.view(%3, [2, 2])
%5: f32[2, 2] = aten.relu(%4)
return %5
)",
                 R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.empty.memory_format([4], 6, none, device("cpu"), none, none)
%2: f32[4] = aten.neg(%0)
%3: f32[2, 2] in %2 = aten.view(%2, [2, 2])
%4: f32[2, 2] = aten.relu(%3)
return %4
)");
}

TEST(Functionalise, ForeachOps) {
  expect_rewrite("functionalise", R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = aten.exp(%0)
aten._foreach_mul_.Scalar([%1!, %2!], 2)
%3: f32[4] = aten.add.Tensor(%1, %2, 1)
return %3
)",
                 R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = aten.exp(%0)
[%3: f32[4], %4: f32[4]] = aten._foreach_mul.Scalar([%1, %2], 2)
%5: f32[4] = aten.add.Tensor(%3, %4, 1)
return %5
)");
}

TEST(Functionalise, KeepsMutationsThatAnAliasObserves) {
  const char* const kNotFunctional[] = {// an older view reads it later
                                        R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[2] in %1 = aten.slice.Tensor(%1, 0, 0, 2, 1)
%3: f32[4] in %1 = aten.relu_(%1!)
%4: f32[2] = aten.exp(%2)
return %4
)",
                                        // only a part of the buffer is written
                                        R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[2] in %1 = aten.slice.Tensor(%1, 0, 0, 2, 1)
%3: f32[2] in %1 = aten.relu_(%2!)
return %1
)",
                                        // the memory is kept after the step
                                        R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] in %1 = aten.relu_(%1!)
kept %1
)",
                                        // the source of a copy is written later
                                        R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.exp(%0)
%2: f32[4] in %1 = aten.copy_(%1!, %0, false)
%3: f32[4] in %0 = aten.zero_(%0!)
%4: f32[4] = aten.neg(%2)
return %4
)",
                                        // the functional op has another result type
                                        R"(input %0: i64[4] argument "0"
input %1: f32[4] argument "1"
%2: i64[4] = aten.neg(%0)
%3: i64[4] in %2 = aten.eq_.Scalar(%2!, 1)
return %3
)"};
  for (const auto* text : kNotFunctional) EXPECT_EQ(matches("functionalise", text), 0) << text;
}

TEST(ConstantFolding, FoldsOpsWithoutInputs) {
  expect_rewrite("constant_folding", R"(input %0: f32[3] argument "0"
%1: f32[3] = aten.arange(3, 6, none, device("cpu"), false)
%2: f32[3] = aten.mul.Tensor(%1, 2)
%3: f32[1, 3] in %2 = aten.unsqueeze(%2, 0)
%4: f32[3, 3]{0, 1} in %2 = aten.expand(%3, [3, 3], false)
%5: f32[3, 3] = aten.add.Tensor(%4, %0, 1)
return %5
)",
                 R"(input %0: f32[3] argument "0"
input %1: f32[3] constant "folded 1" = [0.0, 2.0, 4.0]
%2: f32[1, 3] in %1 = aten.unsqueeze(%1, 0)
%3: f32[3, 3]{0, 1} in %1 = aten.expand(%2, [3, 3], false)
%4: f32[3, 3] = aten.add.Tensor(%3, %0, 1)
return %4
)");
}

TEST(ConstantFolding, KeepsMutatedReturnedRandomAndLargeValues) {
  const std::string zeros = R"(input %0: f32[3] argument "0"
%1: f32[3] = aten.zeros([3], 6, none, device("cpu"), none)
)";
  EXPECT_EQ(matches("constant_folding", zeros + "%2: f32[3] = aten.neg(%1)\nreturn %2\n"), 1);
  EXPECT_EQ(matches("constant_folding", zeros + "%2: f32[3] in %1 = aten.add_.Tensor(%1!, %0, 1)\nreturn %1\n"), 0);
  EXPECT_EQ(matches("constant_folding", zeros + "return %1\n"), 0);
  EXPECT_EQ(matches("constant_folding", R"(%0: f32[2] = aten.rand([2], 6, none, device("cpu"), none)
%1: f32[2] = aten.neg(%0)
return %1
)"),
            0);
  EXPECT_EQ(matches("constant_folding(bytes=8)", zeros + "%2: f32[3] = aten.neg(%1)\nreturn %2\n"), 0);
  EXPECT_ERROR(UsageError, find_pass("constant_folding(byte=8)"), "unknown setting \"byte\"", "it has bytes=65536");
  EXPECT_ERROR(UsageError, find_pass("constant_folding(bytes=many)"), "bytes is \"many\"", "write an integer");
}

TEST(InPlaceOps, ReuseMemoryAfterItsLastRead) {
  expect_rewrite("in_place_ops", R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = aten.tanh(%1)
%3: f32[2, 2] in %2 = aten.view(%2, [2, 2])
%4: f32[2, 2] = aten.mul.Tensor(%3, 2)
%5: f32[2, 2] = aten.exp(%4)
return %5
)",
                 R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] in %1 = aten.tanh_(%1!)
%3: f32[2, 2] in %1 = aten.view(%2, [2, 2])
%4: f32[2, 2] in %1 = aten.mul_.Tensor(%3!, 2)
%5: f32[2, 2] = aten.exp(%4)
return %5
)");
  auto program = parse(R"(input %0: f32[1024] argument "0"
%1: f32[1024] = aten.neg(%0)
%2: f32[1024] = aten.tanh(%1)
%3: f32[] = aten.sum(%2, none)
return %3
)");
  EXPECT_EQ(find_pass("in_place_ops").run(program).note, "peak of 8192 bytes, now 4100");
}

TEST(InPlaceOps, KeepMemoryThatIsReadLaterOrInAnotherLayout) {
  const char* const kNotInPlace[] = {// read later
                                     R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = aten.tanh(%1)
%3: f32[4] = aten.add.Tensor(%2, %1, 1)
return %3
)",
                                     // a part of a larger buffer
                                     R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[2] in %1 = aten.slice.Tensor(%1, 0, 0, 2, 1)
%3: f32[2] = aten.tanh(%2)
%4: f32[] = aten.sum(%3, none)
return %4
)",
                                     // read with other strides
                                     R"(input %0: f32[2, 2] argument "0"
%1: f32[2, 2] = aten.neg(%0)
%2: f32[2, 2]{1, 2} in %1 = aten.t(%1)
%3: f32[2, 2] = aten.add.Tensor(%1, %2, 1)
%4: f32[] = aten.sum(%3, none)
return %4
)",
                                     // the argument is an input, the result an output
                                     R"(input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
return %1
)"};
  for (const auto* text : kNotInPlace) EXPECT_EQ(matches("in_place_ops", text), 0) << text;
}

// %2 would be alive at the peak, which is %5: it is computed again for %8, with the view that %8 reads.
TEST(Recompute, CheapValuesThatLiveOverThePeak) {
  expect_rewrite("recompute", R"(input %0: f32[128, 128] argument "0"
%1: f32[128, 128] = aten.mm(%0, %0)
%2: f32[128, 128] = aten.gelu(%1, "none")
%3: f32[128, 128]{1, 128} in %2 = aten.t(%2)
%4: f32[128, 128] = aten.mm(%0, %2)
%5: f32[256, 128] = aten.cat([%0, %4], 0)
%6: f32[] = aten.sum(%5, none)
%7: f32[128, 128] = aten.mm(%4, %4)
%8: f32[128, 128] = aten.mm(%3, %7)
%9: f32[128, 128] = aten.gelu_backward(%8, %1, "none")
return %6
return %9
)",
                 R"(input %0: f32[128, 128] argument "0"
%1: f32[128, 128] = aten.mm(%0, %0)
%2: f32[128, 128] = aten.gelu(%1, "none")
%3: f32[128, 128]{1, 128} in %2 = aten.t(%2)
%4: f32[128, 128] = aten.mm(%0, %2)
%5: f32[256, 128] = aten.cat([%0, %4], 0)
%6: f32[] = aten.sum(%5, none)
%7: f32[128, 128] = aten.mm(%4, %4)
%8: f32[128, 128] = aten.gelu(%1, "none")
%9: f32[128, 128]{1, 128} in %8 = aten.as_strided(%8, [128, 128], [1, 128], 0)
%10: f32[128, 128] = aten.mm(%9, %7)
%11: f32[128, 128] = aten.gelu_backward(%10, %1, "none")
return %6
return %11
)");
}

TEST(Recompute, NotIfAnOperandIsWrittenOrFreed) {
  for (const auto* last : {"%6: f32[128, 128] = aten.mm(%2, %4)\nreturn %6\n",  // %1 is not used there
                           "%6: f32[128, 128] in %1 = aten.neg_(%1!)\n%7: f32[128, 128] = aten.mm(%2, %6)\n"
                           "%8: f32[128, 128] = aten.mm(%7, %6)\nreturn %8\n"})
    EXPECT_EQ(matches("recompute", std::string(R"(input %0: f32[128, 128] argument "0"
%1: f32[128, 128] = aten.mm(%0, %0)
%2: f32[128, 128] = aten.gelu(%1, "none")
%3: f32[128, 128] = aten.mm(%0, %2)
%4: f32[128, 128] = aten.mm(%3, %3)
%5: f32[256, 128] = aten.cat([%0, %4], 0)
)") + last),
              0)
        << last;
}

// %3 would be alive at the peak, which is %5. Its operand %2 is computed again with it.
TEST(RecomputeProducts, WithinTheirShareOfTheWork) {
  const std::string start = R"(input %0: f32[128, 128] argument "0"
input %1: f32[128, 512] parameter "w"
%2: f32[128, 128] = aten.gelu(%0, "none")
%3: f32[128, 512] = aten.mm(%2, %1)
%4: f32[] = aten.sum(%3, none)
%5: f32[1024, 128] = aten.cat([%0, %0, %0, %0, %0, %0, %0, %0], 0)
%6: f32[] = aten.sum(%5, none)
)";
  const auto text = start + R"(%7: f32[128, 512] = aten.mul.Tensor(%3, %6)
return %4
return %7
)";
  expect_rewrite("recompute_products(percent=100)", text, start + R"(%7: f32[128, 128] = aten.gelu(%0, "none")
%8: f32[128, 512] = aten.mm(%7, %1)
%9: f32[128, 512] = aten.mul.Tensor(%8, %6)
return %4
return %9
)");
  EXPECT_EQ(matches("recompute_products(percent=99)", text), 0);
}

TEST(BatchDims, FollowsTheBatchDimThroughOps) {
  expect_rewrite("batch_dims", R"(input %0: f32[8, 8] argument "0"
input %1: f32[8, 8] parameter "w"
%2: f32[8, 8]{1, 8} in %1 = aten.t(%1)
%3: f32[8, 8] = aten.mm(%0, %2)
%4: f32[64] in %3 = aten.view(%3, [64])
%5: f32[1, 64] in %3 = aten.unsqueeze(%4, 0)
%6: f32[8, 8] in %3 = aten.view(%5, [8, 8])
%7: f32[8, 8] = aten.relu(%6)
%8: f32[] = aten.sum(%7, none)
%9: f32[8, 8]{1, 8} in %7 = aten.t(%7)
%10: f32[8, 8] = aten.mm(%9, %0)
return %8
return %10
)",
                 R"(input %0: f32[8, 8] batch 0 argument "0"
input %1: f32[8, 8] parameter "w"
%2: f32[8, 8]{1, 8} in %1 = aten.t(%1)
%3: f32[8, 8] batch 0 = aten.mm(%0, %2)
%4: f32[64] batch 0 in %3 = aten.view(%3, [64])
%5: f32[1, 64] batch 1 in %3 = aten.unsqueeze(%4, 0)
%6: f32[8, 8] batch 0 in %3 = aten.view(%5, [8, 8])
%7: f32[8, 8] batch 0 = aten.relu(%6)
%8: f32[] batch reduced = aten.sum(%7, none)
%9: f32[8, 8]{1, 8} batch 1 in %7 = aten.t(%7)
%10: f32[8, 8] batch reduced = aten.mm(%9, %0)
return %8
return %10
)");
}

TEST(BatchDims, OtherInputDimAndItsReduction) {
  auto program = parse(R"(input %0: f32[5, 6] argument "0"
%1: f32[6, 5]{1, 6} in %0 = aten.t(%0)
%2: f32[6, 5] = aten.zeros([6, 5], 6, none, device("cpu"), none)
%3: f32[6, 5] = aten.add.Tensor(%2, %1, 1)
%4: f32[5] = aten.sum.dim_IntList(%3, [0], false, none)
return %4
)");
  const auto matched = find_pass("batch_dims(dim=1)").run(program);
  EXPECT_EQ(matched.times, 3);
  EXPECT_EQ(matched.note, "reduced by 1 aten.sum.dim_IntList");
  EXPECT_EQ(program[1].batch_dim, 0);
  EXPECT_EQ(program[2].batch_dim, Value::kNoBatch);
  EXPECT_EQ(program[3].batch_dim, 0);
}

}  // namespace
}  // namespace tessera::compiler
