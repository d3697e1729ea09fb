#include "tests/rules/family_test.h"

namespace tessera::testing {
namespace {

TEST(EmbeddingRules, HoldByBruteForce) {
  auto table = numbers({7, 3}), one = integers({5}, 7), two = integers({2, 5}, 7);
  expect_family_holds("embedding", {
                                       {"aten::embedding", {table, one}, {}},
                                       {"aten::embedding", {table, two, 2}, {}},
                                       {"aten::embedding_dense_backward", {numbers({5, 3}), one, 7, -1, false}, {}},
                                       {"aten::embedding_dense_backward", {numbers({2, 5, 3}), two, 7, 2, false}, {}},
                                       {"aten::embedding_dense_backward", {numbers({2, 5, 3}), two, 7, -1, true}, {}},
                                   });
}

TEST(EmbeddingRules, IndexOutOfRangeThrowsForShardedWeights) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tessera::masked_embedding", "");
  auto run = [&](int64_t index) {
    torch::jit::Stack stack = {numbers({3, 2}), integers({1}, 1).add(index), -1, false, false, 7, 3};
    op.callBoxed(stack);
    return stack[0].toTensor();
  };
  EXPECT_EQ(run(6).count_nonzero().item<int64_t>(), 0);  // another rank has row 6
  EXPECT_EQ(run(4).count_nonzero().item<int64_t>(), 2);
  EXPECT_THROW(run(7), c10::IndexError);
  EXPECT_THROW(run(-1), c10::IndexError);
}

}  // namespace
}  // namespace tessera::testing
