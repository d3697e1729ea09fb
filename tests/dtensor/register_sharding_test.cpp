// register_sharding for a custom op, and same_as.
#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/register.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

namespace tessera {
namespace {

at::Tensor scale_rows(const at::Tensor& x, const at::Tensor& by) { return x * by.unsqueeze(1); }

TORCH_LIBRARY(register_sharding_test, m) {
  m.def("scale_rows(Tensor x, Tensor by) -> Tensor");
  m.def("scale_rows_too(Tensor x, Tensor by) -> Tensor");
  m.def("without_rule(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(register_sharding_test, CPU, m) {
  m.impl("scale_rows", scale_rows);
  m.impl("scale_rows_too", scale_rows);
  m.impl("without_rule", [](const at::Tensor& x) { return x + 1; });
}

at::Tensor call(const char* name, const at::Tensor& x, const at::Tensor& by) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>()
      .call(x, by);
}

TEST(RegisterSharding, StrategiesOfACustomOp) {
  register_sharding("register_sharding_test::scale_rows", {
                                                              {{Replicate(), Replicate()}, {Replicate()}},
                                                              {{Shard(0), Shard(0)}, {Shard(0)}},
                                                              {{Shard(1), Replicate()}, {Shard(1)}},
                                                          });
  same_as("register_sharding_test::scale_rows_too", "register_sharding_test::scale_rows");
  const auto x = torch::randn({5, 4}), by = torch::randn({5});
  testing::run_ranks(2, [&](testing::Rank& me) {
    const auto mesh = me.mesh("tp=2");
    for (const char* op : {"register_sharding_test::scale_rows", "register_sharding_test::scale_rows_too"})
      for (const auto& p : {Replicate(), Shard(0), Shard(1)}) {
        const auto out = DTensor(call(op, distribute_tensor(x, mesh, {p}), distribute_tensor(by, mesh)));
        EXPECT_EQ(out.placements()[0], p);
        EXPECT_TRUE(torch::allclose(out.full_tensor(), x * by.unsqueeze(1)));
      }
  });
}

TEST(RegisterSharding, AnOpWithoutARuleNeedsReplicatedInputs) {
  const auto x = torch::randn({5, 4});
  testing::run_ranks(2, [&](testing::Rank& me) {
    const auto op = c10::Dispatcher::singleton()
                        .findSchemaOrThrow("register_sharding_test::without_rule", "")
                        .typed<at::Tensor(const at::Tensor&)>();
    EXPECT_THROW(op.call(distribute_tensor(x, me.mesh("tp=2"), {Shard(0)})), ShardingError);
    EXPECT_TRUE(torch::equal(DTensor(op.call(distribute_tensor(x, me.mesh("tp=2")))).full_tensor(), x + 1));
  });
}

TEST(RegisterSharding, RejectsBadRegistrations) {
  EXPECT_THROW(register_sharding("register_sharding_test::scale_rows", std::vector<rules::Strategy>{}), UsageError);
  EXPECT_THROW(same_as("register_sharding_test::scale_rows", "register_sharding_test::nothing"), UsageError);
}

}  // namespace
}  // namespace tessera
