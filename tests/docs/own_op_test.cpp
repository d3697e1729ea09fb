// Compiles and runs the blocks of docs/own_op.md.
#include "tessera/testing/ranks.h"
#include "tessera/testing/rule_oracle.h"

#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <iostream>

namespace own_op_page {

namespace ts = tessera;

#include "own_op_1.inc"

TEST(OwnOpPage, BlocksRun) {
#include "own_op_2.inc"
#include "own_op_3.inc"
  EXPECT_TRUE(report.wrong.empty()) << report;
  EXPECT_GT(report.cases, 0);
  const auto call = [](const at::Tensor& x, const at::Tensor& by) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("tutorial::scale_rows", "");
    return op.typed<at::Tensor(const at::Tensor&, const at::Tensor&)>().call(x, by);
  };
  ts::testing::run_ranks(2, [&](ts::testing::Rank& me) {
    const auto mesh = me.mesh("tp=2");
#include "own_op_4.inc"
    EXPECT_EQ(y.placements()[0], ts::Placement(ts::Shard(0)));
    EXPECT_TRUE(y.full_tensor().allclose(scale_rows(x.full_tensor(), by.full_tensor())));
  });
}

}  // namespace own_op_page
