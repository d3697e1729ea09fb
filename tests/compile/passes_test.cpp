// Passes of data parallelism and the basic cleanups, each by text: the program before and after.
#include "expect_rewrite.h"

#include <torch/torch.h>

namespace tessera::compiler {
namespace {

TEST(Passes, FoldViews) {
  expect_rewrite("fold_views", R"(input %0: f32[2, 3] argument "0"
%1: f32[3, 2]{1, 3} in %0 = aten.t(%0)
%2: f32[2, 3] in %0 = aten.t(%1)
%3: f32[2, 3] = aten.relu(%2)
return %3
)",
                 R"(input %0: f32[2, 3] argument "0"
%1: f32[3, 2]{1, 3} in %0 = aten.t(%0)
%2: f32[2, 3] = aten.relu(%0)
return %2
)");
}

TEST(Passes, CommonSubexpressions) {
  expect_rewrite("common_subexpressions", R"(input %0: f32[3] argument "0"
%1: f32[3] = aten.relu(%0)
%2: f32[3] = aten.relu(%0)
%3: f32[3] = aten.mul.Tensor(%1, %2)
%4: f32[3] in %0 = aten.zero_(%0!)
%5: f32[3] = aten.relu(%0)
%6: f32[3] = aten.mul.Tensor(%3, %5)
return %6
)",
                 R"(input %0: f32[3] argument "0"
%1: f32[3] = aten.relu(%0)
%2: f32[3] = aten.mul.Tensor(%1, %1)
%3: f32[3] in %0 = aten.zero_(%0!)
%4: f32[3] = aten.relu(%0)
%5: f32[3] = aten.mul.Tensor(%2, %4)
return %5
)");
}

TEST(Passes, DeadCode) {
  expect_rewrite("dead_code", R"(input %0: f32[2, 3] argument "0"
%1: f32[3, 2]{1, 3} in %0 = aten.t(%0)
%2: f32[2, 3] = aten.relu(%0)
%3: f32[2, 3] in %2 = aten.mul_.Tensor(%2!, 2)
%4: f32[2, 3] = aten.neg(%0)
%5: f32[2, 3] in %0 = aten.zero_(%0!)
return %4
)",
                 R"(input %0: f32[2, 3] argument "0"
%1: f32[2, 3] = aten.neg(%0)
%2: f32[2, 3] in %0 = aten.zero_(%0!)
return %1
)");
}

// Two gradients that fill one bucket, and a third in the next. The first is copied into an existing .grad.
const std::string kReductions = R"(group @dp [0, 1]
input %0: f32[4] argument "0"
input %1: f32[512, 512] argument "1"
input %2: f32[4] gradient "bias"
%3: f32[4] = aten.neg(%0)
%4: f32[4] = aten.div.Tensor(%3, 2)
%5: f32[4] = tessera.all_reduce(%4, "sum", @dp)
%6: f32[4] in %5 = tessera.wait(%5!, @dp)
%7: f32[4] in %2 = aten.copy_(%2!, %6, false)
%8: f32[512, 512] = aten.neg(%1)
%9: f32[512, 512] = aten.div.Tensor(%8, 2)
%10: f32[512, 512] = tessera.all_reduce(%9, "sum", @dp)
%11: f32[512, 512] in %10 = tessera.wait(%10!, @dp)
%12: f32[4] = aten.relu(%0)
%13: f32[4] = aten.div.Tensor(%12, 2)
%14: f32[4] = tessera.all_reduce(%13, "sum", @dp)
%15: f32[4] in %14 = tessera.wait(%14!, @dp)
gradient %11 "weight"
gradient %15 "last"
)";

TEST(Passes, FuseDdpWithConcatOp) {
  expect_rewrite("fuse_ddp_with_concat_op", kReductions,
                 R"(group @dp [0, 1]
input %0: f32[4] argument "0"
input %1: f32[512, 512] argument "1"
input %2: f32[4] gradient "bias"
%3: f32[4] = aten.neg(%0)
%4: f32[512, 512] = aten.neg(%1)
%5: f32[4] in %3 = aten.flatten.using_ints(%3, 0, -1)
%6: f32[262144] in %4 = aten.flatten.using_ints(%4, 0, -1)
%7: f32[262148] = aten.cat([%5, %6], 0)
%8: f32[262148] = aten.div.Tensor(%7, 2.0)
%9: f32[262148] = tessera.all_reduce(%8, "sum", @dp)
%10: f32[262148] in %9 = tessera.wait(%9!, @dp)
[%11: f32[4] in %9, %12: f32[262144] in %9 + 4] = aten.split_with_sizes(%10, [4, 262144], 0)
%13: f32[4] in %9 = aten.view(%11, [4])
%14: f32[512, 512] in %9 + 4 = aten.view(%12, [512, 512])
%15: f32[4] in %2 = aten.copy_(%2!, %13, false)
%16: f32[4] = aten.relu(%0)
%17: f32[4] = aten.div.Tensor(%16, 2)
%18: f32[4] = tessera.all_reduce(%17, "sum", @dp)
%19: f32[4] in %18 = tessera.wait(%18!, @dp)
gradient %14 "weight"
gradient %19 "last"
)");
}

TEST(Passes, FuseDdpWithCoalescedOp) {
  expect_rewrite("fuse_ddp_with_coalesced_op", kReductions,
                 R"(group @dp [0, 1]
input %0: f32[4] argument "0"
input %1: f32[512, 512] argument "1"
input %2: f32[4] gradient "bias"
%3: f32[4] = aten.neg(%0)
%4: f32[512, 512] = aten.neg(%1)
[%5: f32[4], %6: f32[512, 512]] = aten._foreach_div.Scalar([%3, %4], 2.0)
[%7: f32[4], %8: f32[512, 512]] = tessera.all_reduce_coalesced([%5, %6], "sum", @dp)
%9: f32[4] in %7 = tessera.wait(%7!, @dp)
%10: f32[512, 512] in %8 = tessera.wait(%8!, @dp)
%11: f32[4] in %2 = aten.copy_(%2!, %9, false)
%12: f32[4] = aten.relu(%0)
%13: f32[4] = aten.div.Tensor(%12, 2)
%14: f32[4] = tessera.all_reduce(%13, "sum", @dp)
%15: f32[4] in %14 = tessera.wait(%14!, @dp)
gradient %10 "weight"
gradient %15 "last"
)");
}

// A bucket is filled when its last gradient is computed, so no gradient in it may be mutated before that.
TEST(Passes, MutatedGradientIsNotBucketed) {
  auto program = parse(R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = aten.div.Tensor(%1, 2)
%3: f32[4] = tessera.all_reduce(%2, "sum", @dp)
%4: f32[4] in %3 = tessera.wait(%3!, @dp)
%5: f32[4] in %1 = aten.zero_(%1!)
%6: f32[4] = aten.relu(%0)
%7: f32[4] = aten.div.Tensor(%6, 2)
%8: f32[4] = tessera.all_reduce(%7, "sum", @dp)
%9: f32[4] in %8 = tessera.wait(%8!, @dp)
gradient %4 "a"
gradient %9 "b"
)");
  EXPECT_EQ(find_pass("fuse_ddp_with_concat_op").run(program).times, 0);
}

// First: two all-gathers of parameters are coalesced; a third one reads a parameter that is mutated in between, and
// stays. Second: two all-gathers of FSDP units, which write runs of flat buffers, become one.
TEST(Passes, BucketAllGathers) {
  expect_rewrite("bucket_all_gathers", R"(group @dp [0, 1]
input %0: f32[4] parameter "a"
input %1: f32[2, 3] parameter "b"
%2: f32[8] = tessera.all_gather(%0, 0, [4, 4], @dp)
%3: f32[8] in %2 = tessera.wait(%2!, @dp)
%4: f32[8] = aten.relu(%3)
%5: f32[3, 2]{1, 3} in %1 = aten.t(%1)
%6: f32[2, 3] in %1 = aten.t(%5)
%7: f32[4, 3] = tessera.all_gather(%6, 0, [2, 2], @dp)
%8: f32[4, 3] in %7 = tessera.wait(%7!, @dp)
%9: f32[2, 3] in %1 = aten.neg_(%1!)
%10: f32[4, 3] = tessera.all_gather(%9, 0, [2, 2], @dp)
%11: f32[4, 3] in %10 = tessera.wait(%10!, @dp)
return %4
return %8
return %11
)",
                 R"(group @dp [0, 1]
input %0: f32[4] parameter "a"
input %1: f32[2, 3] parameter "b"
%2: f32[3, 2]{1, 3} in %1 = aten.t(%1)
%3: f32[2, 3] in %1 = aten.t(%2)
[%4: f32[8], %5: f32[4, 3]] = tessera.all_gather_coalesced([%0, %3], [0, 0], [4, 4, 2, 2], @dp)
%6: f32[8] in %4 = tessera.wait(%4!, @dp)
%7: f32[8] = aten.relu(%6)
%8: f32[4, 3] in %5 = tessera.wait(%5!, @dp)
%9: f32[2, 3] in %1 = aten.neg_(%1!)
%10: f32[4, 3] = tessera.all_gather(%9, 0, [2, 2], @dp)
%11: f32[4, 3] in %10 = tessera.wait(%10!, @dp)
return %7
return %8
return %11
)");
  expect_rewrite("bucket_all_gathers", R"(group @dp [0, 1]
input %0: f32[4] parameter "a"
input %1: f32[2] parameter "b"
%2: f32[8] = aten.empty.memory_format([8], 6, none, device("cpu"), none, none)
tessera.all_gather_into_segments_([%2!], %0, [1, 0, 0, 4, 1, 0, 4, 4], "first", @dp)
%3: f32[8] in %2 = tessera.wait(%2!, @dp)
%4: f32[8] = aten.relu(%3)
%5: f32[3] = aten.empty.memory_format([3], 6, none, device("cpu"), none, none)
tessera.all_gather_into_segments_([%5!], %1, [1, 0, 0, 2, 2, 0, 2, 1, -1, 0, 1], "second", @dp)
%6: f32[3] in %5 = tessera.wait(%5!, @dp)
return %4
return %6
)",
                 R"(group @dp [0, 1]
input %0: f32[4] parameter "a"
input %1: f32[2] parameter "b"
%2: f32[8] = aten.empty.memory_format([8], 6, none, device("cpu"), none, none)
%3: f32[3] = aten.empty.memory_format([3], 6, none, device("cpu"), none, none)
%4: f32[6] = aten.cat([%0, %1], 0)
tessera.all_gather_into_segments_([%2!, %3!], %4, [2, 0, 0, 4, 1, 0, 2, 3, 0, 4, 4, 1, 2, 1, -1, 0, 1], "first, second", @dp)
%5: f32[8] in %2 = tessera.wait(%2!, @dp)
%6: f32[8] = aten.relu(%5)
%7: f32[3] in %3 = tessera.wait(%3!, @dp)
return %6
return %7
)");
}

TEST(Passes, PrefetchAllGathers) {
  expect_rewrite("prefetch_all_gathers", R"(group @dp [0, 1]
input %0: f32[4] parameter "a"
input %1: f32[4] parameter "b"
%2: f32[8] = tessera.all_gather(%0, 0, [4, 4], @dp)
%3: f32[8] in %2 = tessera.wait(%2!, @dp)
%4: f32[8] = aten.relu(%3)
%5: f32[8] = aten.neg(%4)
%6: f32[2, 2] in %1 = aten.view(%1, [2, 2])
%7: f32[4, 2] = tessera.all_gather(%6, 0, [2, 2], @dp)
%8: f32[4, 2] in %7 = tessera.wait(%7!, @dp)
return %5
return %8
)",
                 R"(group @dp [0, 1]
input %0: f32[4] parameter "a"
input %1: f32[4] parameter "b"
%2: f32[8] = tessera.all_gather(%0, 0, [4, 4], @dp)
%3: f32[8] in %2 = tessera.wait(%2!, @dp)
%4: f32[2, 2] in %1 = aten.view(%1, [2, 2])
%5: f32[4, 2] = tessera.all_gather(%4, 0, [2, 2], @dp)
%6: f32[8] = aten.relu(%3)
%7: f32[8] = aten.neg(%6)
%8: f32[4, 2] in %5 = tessera.wait(%5!, @dp)
return %7
return %8
)");
}

TEST(Passes, BucketReduceScatters) {
  expect_rewrite("bucket_reduce_scatters", R"(group @dp [0, 1]
input %0: f32[8] argument "0"
%1: f32[8] = aten.neg(%0)
%2: f32[4] = tessera.reduce_scatter(%1, 0, [4, 4], "sum", @dp)
%3: f32[4] in %2 = tessera.wait(%2!, @dp)
%4: f32[4] = aten.div.Tensor(%3, 2)
%5: f32[8] = aten.relu(%0)
%6: f32[4] = tessera.reduce_scatter(%5, 0, [4, 4], "sum", @dp)
%7: f32[4] in %6 = tessera.wait(%6!, @dp)
gradient %4 "a"
gradient %7 "b"
)",
                 R"(group @dp [0, 1]
input %0: f32[8] argument "0"
%1: f32[8] = aten.neg(%0)
%2: f32[8] = aten.relu(%0)
[%3: f32[4], %4: f32[4]] = tessera.reduce_scatter_coalesced([%1, %2], [0, 0], [4, 4, 4, 4], "sum", @dp)
%5: f32[4] in %3 = tessera.wait(%3!, @dp)
%6: f32[4] = aten.div.Tensor(%5, 2)
%7: f32[4] in %4 = tessera.wait(%4!, @dp)
gradient %6 "a"
gradient %7 "b"
)");
  expect_rewrite("bucket_reduce_scatters", R"(group @dp [0, 1]
input %0: f32[8] argument "0"
%1: f32[4] = aten.empty.memory_format([4], 6, none, device("cpu"), none, none)
%2: f32[4] in %1 = tessera.reduce_scatter_segments_into_(%1!, [%0], [1, 0, 0, 4, 1, 0, 4, 4], "sum", "last", @dp)
%3: f32[8] = aten.relu(%0)
%4: f32[4] = aten.empty.memory_format([4], 6, none, device("cpu"), none, none)
%5: f32[4] in %4 = tessera.reduce_scatter_segments_into_(%4!, [%3], [1, 0, 0, 4, 1, 0, 4, 4], "sum", "first", @dp)
%6: f32[4] in %1 = tessera.wait(%2!, @dp)
%7: f32[4] in %4 = tessera.wait(%5!, @dp)
gradient %6 "a"
gradient %7 "b"
)",
                 R"(group @dp [0, 1]
input %0: f32[8] argument "0"
%1: f32[4] = aten.empty.memory_format([4], 6, none, device("cpu"), none, none)
%2: f32[8] = aten.relu(%0)
%3: f32[4] = aten.empty.memory_format([4], 6, none, device("cpu"), none, none)
%4: f32[8] = aten.empty.memory_format([8], 6, none, device("cpu"), none, none)
%5: f32[8] in %4 = tessera.reduce_scatter_segments_into_(%4!, [%0, %2], [2, 0, 0, 4, 1, 0, 4, 2, 0, 4, 4, 1, 4, 4], "sum", "last, first", @dp)
%6: f32[8] in %4 = tessera.wait(%5!, @dp)
%7: f32[4] in %4 = aten.as_strided(%6, [4], [1], 0)
%8: f32[4] in %1 = aten.copy_(%1!, %7, false)
%9: f32[8] in %4 = tessera.wait(%5!, @dp)
%10: f32[4] in %4 + 4 = aten.as_strided(%9, [4], [1], 4)
%11: f32[4] in %3 = aten.copy_(%3!, %10, false)
gradient %8 "a"
gradient %11 "b"
)");
}

TEST(Passes, HoistCommunication) {
  expect_rewrite("hoist_communication", R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = aten.relu(%0)
%3: f32[4] = aten.div.Tensor(%1, 2)
%4: f32[4] = tessera.all_reduce(%3, "sum", @dp)
%5: f32[4] in %4 = tessera.wait(%4!, @dp)
return %2
return %5
)",
                 R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = aten.div.Tensor(%1, 2)
%3: f32[4] = tessera.all_reduce(%2, "sum", @dp)
%4: f32[4] = aten.relu(%0)
%5: f32[4] in %3 = tessera.wait(%3!, @dp)
return %4
return %5
)");
}

TEST(Passes, ScheduleCommWait) {
  expect_rewrite("schedule_comm_wait", R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = tessera.all_reduce(%1, "sum", @dp)
%3: f32[4] in %2 = tessera.wait(%2!, @dp)
%4: f32[2, 2] in %2 = aten.view(%3, [2, 2])
%5: f32[4] = aten.relu(%0)
%6: f32[4] = tessera.all_reduce(%5, "sum", @dp)
%7: f32[4] in %6 = tessera.wait(%6!, @dp)
%8: f32[2, 2] = aten.neg(%4)
return %8
return %7
)",
                 R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = tessera.all_reduce(%1, "sum", @dp)
%3: f32[4] = aten.relu(%0)
%4: f32[4] = tessera.all_reduce(%3, "sum", @dp)
%5: f32[4] in %2 = tessera.wait(%2!, @dp)
%6: f32[2, 2] in %2 = aten.view(%5, [2, 2])
%7: f32[2, 2] = aten.neg(%6)
%8: f32[4] in %4 = tessera.wait(%4!, @dp)
return %7
return %8
)");
}

TEST(Passes, InPlaceCollectives) {
  expect_rewrite("in_place_collectives", R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = tessera.all_reduce(%1, "sum", @dp)
%3: f32[4] in %2 = tessera.wait(%2!, @dp)
%4: f32[4] = tessera.all_reduce(%0, "sum", @dp)
%5: f32[4] in %4 = tessera.wait(%4!, @dp)
[%6: f32[4], %7: f32[4]] = aten._foreach_div.Scalar([%3, %5], 2.0)
[%8: f32[4], %9: f32[4]] = tessera.all_reduce_coalesced([%6, %7], "sum", @dp)
%10: f32[4] in %8 = tessera.wait(%8!, @dp)
%11: f32[4] in %9 = tessera.wait(%9!, @dp)
return %10
return %11
)",
                 R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] in %1 = tessera.all_reduce_(%1!, "sum", @dp)
%3: f32[4] in %1 = tessera.wait(%2!, @dp)
%4: f32[4] = tessera.all_reduce(%0, "sum", @dp)
%5: f32[4] in %4 = tessera.wait(%4!, @dp)
[%6: f32[4], %7: f32[4]] = aten._foreach_div.Scalar([%3, %5], 2.0)
tessera.all_reduce_coalesced_([%6!, %7!], "sum", @dp)
%8: f32[4] in %6 = tessera.wait(%6!, @dp)
%9: f32[4] in %7 = tessera.wait(%7!, @dp)
return %8
return %9
)");
}

TEST(Program, PrintedTextParsesToTheSameProgram) {
  const std::string other = R"(number $lr
input %0: f32[2, 3] parameter "w"
input %1: bf16[2, 3]{1, 2} argument "0"
%2: f32[2, 3] = aten.add.Tensor(%0, 2.5, 1)
%3: f32[2, 3] in %0 = aten.add_.Tensor(%0!, %2, -$lr)
%4: f32[3] = aten.arange(3.0, 6, none, device("cpu"), false)  # net1
%5: f32[2, 3], undefined = aten.native_dropout(%0, 0.1, none)
[%6: f32[1, 3] in %0, %7: f32[1, 3] in %0 + 3] = aten.split_with_sizes(%0, [1, 1], 0)
kept %2
)";
  for (const auto& text : {kReductions, other}) EXPECT_EQ(text_of(parse(text)), text);
}

}  // namespace
}  // namespace tessera::compiler
