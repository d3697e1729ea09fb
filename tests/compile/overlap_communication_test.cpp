// overlap_communication: collectives are posted as early as a memory limit allows.
#include "tessera/compile/detail/passes/memory_by_order.h"
#include "tessera/compile/detail/passes/pass.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <numeric>

namespace tessera::compiler {
namespace {

// Two all-gathers, each used right after it. Each result has 64 bytes, and so has each relu.
const std::string kTwoGathers = R"(group @dp [0, 1]
input %0: f32[8] parameter "a"
input %1: f32[8] parameter "b"
%2: f32[16] = tessera.all_gather(%0, 0, [8, 8], @dp)
%3: f32[16] in %2 = tessera.wait(%2!, @dp)
%4: f32[16] = aten.relu(%3)
%5: f32[] = aten.sum(%4, none)
%6: f32[16] = tessera.all_gather(%1, 0, [8, 8], @dp)
%7: f32[16] in %6 = tessera.wait(%6!, @dp)
%8: f32[16] = aten.relu(%7)
%9: f32[] = aten.sum(%8, none)
return %5
return %9
)";

int64_t peak_of(const Program& program) {
  std::vector<int32_t> order(program.nodes.size());
  std::iota(order.begin(), order.end(), 0);
  return MemoryByOrder(program).peak(order);
}

// The program after `pass`, which must match `times` times.
Program rewritten_by(const std::string& pass, int64_t times) {
  auto program = parse(kTwoGathers);
  verify(program);
  EXPECT_EQ(find_pass(pass).run(program).times, times);
  verify(program);
  return program;
}

// The index of the node with the `which`-th use of an op.
size_t line_of(const Program& program, const std::string& op, int which) {
  for (size_t n = 0; n < program.nodes.size(); n++)
    if (program.nodes[n].name() == op && which-- == 0) return n;
  return program.nodes.size();
}

TEST(OverlapCommunication, PostsAsEarlyAsTheMemoryLimitAllows) {
  EXPECT_EQ(peak_of(parse(kTwoGathers)), 128);
  // The peak of the original order is the default limit: the second result does not fit next to the first relu.
  const auto tight = rewritten_by("overlap_communication", 1);
  EXPECT_LE(peak_of(tight), 128);
  EXPECT_GT(line_of(tight, "tessera.all_gather", 1), line_of(tight, "aten.relu", 0));
  // With room for 64 more bytes both are posted at the start.
  const auto relaxed = rewritten_by("overlap_communication(bytes=192)", 1);
  EXPECT_EQ(peak_of(relaxed), 192);
  EXPECT_EQ(line_of(relaxed, "tessera.all_gather", 1), 1);
}

TEST(OverlapCommunication, ProgramAfterThePass) {
  auto program = rewritten_by("overlap_communication(bytes=192)", 1);
  renumber(program);
  EXPECT_EQ(text_of(program), R"(group @dp [0, 1]
input %0: f32[8] parameter "a"
input %1: f32[8] parameter "b"
%2: f32[16] = tessera.all_gather(%0, 0, [8, 8], @dp)
%3: f32[16] = tessera.all_gather(%1, 0, [8, 8], @dp)
%4: f32[16] in %2 = tessera.wait(%2!, @dp)
%5: f32[16] = aten.relu(%4)
%6: f32[] = aten.sum(%5, none)
%7: f32[16] in %3 = tessera.wait(%3!, @dp)
%8: f32[16] = aten.relu(%7)
%9: f32[] = aten.sum(%8, none)
return %6
return %9
)");
}

}  // namespace
}  // namespace tessera::compiler
