// Programs, and the exact collectives that they must post: number, names and causing op.
#include "tessera/debug/comm_debug_mode.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/policy.h"
#include "tessera/testing/ranks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

using comm::CommKind;
using comm::Family;
using testing::Rank;
using testing::run_ranks;

at::Tensor numbers(int64_t rows, int64_t columns) {
  return at::arange(rows * columns, at::kFloat).view({rows, columns});
}

// Runs `program` on 1, 2 and 4 ranks of a mesh axis "tp"; prepare(mesh) makes its tensor before and is not counted.
template <class Prepare, class Program>
void expect_counts(const CommCounts& counts, Prepare prepare, Program program, bool also_on_one_rank = true) {
  for (int n : {1, 2, 4})
    run_ranks(n, [&](Rank& me) {
      const auto mesh = me.mesh({n}, {"tp"});
      const auto x = prepare(mesh);
      CommDebugMode mode;
      program(mesh, x);
      const auto expected = n > 1 || also_on_one_rank ? counts : CommCounts();
      EXPECT_EQ(mode.get_comm_counts(), expected) << n << " ranks\n" << mode.debug_string();
      EXPECT_EQ(mode.get_total_counts(), expected.total());
      EXPECT_EQ(mode.implicit_redistributions(), 0);
    });
}

auto distributed(Placement p) {
  return [p](const DeviceMesh& mesh) { return distribute_tensor(numbers(8, 12), mesh, {p}); };
}
DTensor terms(const DeviceMesh& mesh) { return DTensor::from_local(numbers(8, 12), mesh, {Partial()}); }
auto redistribute_to(Placement p) {
  return [p](const DeviceMesh&, const DTensor& x) {
    DTensor y = x.redistribute({p});
    (void)y.to_local();
  };
}

TEST(CommDebugMode, DistributeTensorUsesC10dCollectives) {
  auto nothing = [](const DeviceMesh&) { return at::Tensor(); };
  auto distribute = [](Placement p) {
    return [p](const DeviceMesh& mesh, const at::Tensor&) { distribute_tensor(numbers(8, 12), mesh, {p}); };
  };
  expect_counts({{"c10d.scatter_", 1}}, nothing, distribute(Shard(0)));
  expect_counts({{"c10d.scatter_", 1}}, nothing, distribute(Shard(1)));
  expect_counts({{"c10d.broadcast_", 1}}, nothing, distribute(Replicate()));
}

TEST(CommDebugMode, RedistributeUsesFunctionalCollectives) {
  const auto expect = [](const CommCounts& counts, auto prepare, Placement to) {
    expect_counts(counts, prepare, redistribute_to(to), /*also_on_one_rank=*/false);
  };
  expect({{"c10d_functional.all_gather_into_tensor", 1}}, distributed(Shard(0)), Replicate());
  expect({{"c10d_functional.all_gather_into_tensor", 1}}, distributed(Shard(1)), Replicate());
  expect({{"c10d_functional.all_to_all_single", 1}}, distributed(Shard(0)), Shard(1));
  expect({{"c10d_functional.all_reduce", 1}}, terms, Replicate());
  expect({{"c10d_functional.reduce_scatter_tensor", 1}}, terms, Shard(0));
  expect({{"c10d_functional.reduce_scatter_tensor", 1}}, terms, Shard(1));
}

TEST(CommDebugMode, LocalRedistributionsAreNotCounted) {
  expect_counts({}, distributed(Replicate()), redistribute_to(Shard(0)));
  expect_counts({}, distributed(Shard(0)), redistribute_to(Shard(0)));
  expect_counts({}, distributed(Shard(0)), [](const DeviceMesh&, const DTensor& x) { x.add(x).mul(2.0).t(); });
}

TEST(CommDebugMode, WaitAndBarrierAreNotCounted) {
  auto program = [](const DeviceMesh& mesh, const at::Tensor&) {
    auto group = mesh.get_group();
    group->barrier().wait();
    auto t = at::ones({4});
    group->all_reduce(t, ReduceOp::Sum).wait();
    group->barrier().wait();
  };
  expect_counts(
      {{"c10d.allreduce_", 1}}, [](const DeviceMesh&) { return at::Tensor(); }, program);
}

TEST(CommDebugMode, UnevenShardsHaveTheSameCounts) {
  run_ranks(4, [](Rank& me) {
    const auto x = distribute_tensor(numbers(10, 3), me.mesh("tp=4"), {Shard(0)});
    CommDebugMode mode;
    EXPECT_TRUE(x.full_tensor().equal(numbers(10, 3)));
    EXPECT_EQ(mode.get_total_counts(), 1) << mode.debug_string();
  });
}

TEST(CommDebugMode, BackwardIsCounted) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    auto x = distribute_tensor(numbers(8, 12).requires_grad_(), mesh, {Shard(0)});
    CommDebugMode mode;
    auto y = x.redistribute({Shard(1)});
    EXPECT_EQ(mode.get_comm_counts().of(CommKind::AllToAllSingle), 1);
    y.mul(y).sum().backward();
    EXPECT_EQ(mode.get_comm_counts().of(CommKind::AllToAllSingle), 2) << mode.debug_string();
  });
}

TEST(CommDebugMode, NestedModesBothCountInnerCollectives) {
  run_ranks(2, [](Rank& me) {
    const auto x = distribute_tensor(numbers(8, 12), me.mesh("tp=2"), {Shard(0)});
    CommDebugMode outer;
    x.full_tensor();
    {
      CommDebugMode inner;
      x.redistribute({Shard(1)}).to_local();
      EXPECT_EQ(inner.get_comm_counts(), (CommCounts{{"c10d_functional.all_to_all_single", 1}}));
      EXPECT_NE(outer.debug_string().find(inner.debug_string()), std::string::npos);
    }
    x.full_tensor();
    EXPECT_EQ(outer.get_comm_counts(),
              (CommCounts{{"c10d_functional.all_gather_into_tensor", 2}, {"c10d_functional.all_to_all_single", 1}}));
  });
}

TEST(CommDebugMode, EnterResetsAndCountsStayReadableAfterExit) {
  run_ranks(2, [](Rank& me) {
    const auto x = distribute_tensor(numbers(8, 12), me.mesh("tp=2"), {Shard(0)});
    CommDebugMode mode;
    x.full_tensor();
    mode.exit();
    EXPECT_FALSE(mode.is_open());
    x.full_tensor();
    EXPECT_EQ(mode.get_total_counts(), 1);
    EXPECT_NE(mode.debug_string(), "");
    mode.enter();
    EXPECT_EQ(mode.get_total_counts(), 0);
    EXPECT_EQ(mode.debug_string(), "");
    x.full_tensor();
    mode.reset();
    EXPECT_EQ(mode.get_total_counts(), 0);
  });
}

TEST(CommDebugMode, ThreadsHaveSeparateCounts) {
  run_ranks(2, [](Rank& me) {
    const auto group = me.group();
    auto t = at::ones({4});
    std::optional<CommDebugMode> mode;
    if (me.rank == 0) mode.emplace();
    group->all_reduce(t, ReduceOp::Sum).wait();
    EXPECT_EQ(mode ? mode->get_total_counts() : 1, 1);
  });
}

TEST(CommDebugMode, CountsByModuleAndBytesByAxis) {
  run_ranks(4, [](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    const auto x = distribute_tensor(numbers(8, 12), mesh, {Shard(0), Shard(1)});
    CommDebugMode mode;
    {
      ModuleNameScope model("model");
      x.redistribute({Replicate(), Shard(1)}).to_local();
      ModuleNameScope layer("model.layers.0");
      EXPECT_EQ(running_module(), "model.layers.0");
      x.redistribute({Shard(0), Replicate()}).to_local();
    }
    EXPECT_EQ(running_module(), "");
    const CommCounts one{{"c10d_functional.all_gather_into_tensor", 1}};
    EXPECT_EQ(mode.get_comm_counts_by_module(),
              (std::map<std::string, CommCounts>{{"model", one}, {"model.layers.0", one}}));
    // (8, 6) floats gathered over dp, (4, 12) gathered over tp
    EXPECT_EQ(mode.get_bytes_by_axis(), (std::map<std::string, int64_t>{{"dp", 8 * 6 * 4}, {"tp", 4 * 12 * 4}}));
    EXPECT_EQ(mode.debug_string(), R"([nn.Mod] model
  redistribute_input(0, [S(0), S(1)]->[R, S(1)]) explicit
    c10d_functional::all_gather_into_tensor(dp, 192 B)
[nn.Mod] model.layers.0
  redistribute_input(0, [S(0), S(1)]->[S(0), R]) explicit
    c10d_functional::all_gather_into_tensor(tp, 192 B)
)");
  });
}

TEST(CommDebugMode, DebugStringShowsTheCausingOp) {
  run_ranks(4, [](Rank& me) {
    const auto mesh = me.mesh("tp=4");
    const auto x = distribute_tensor(numbers(64, 10), mesh, {Shard(0)});
    const auto w = distribute_tensor(numbers(10, 4), mesh, {Shard(0)});
    CommDebugMode mode;
    DTensor y = at::mm(x, w);
    y.redistribute({Replicate()}).to_local();
    auto t = at::ones({2});
    mesh.get_group()->broadcast(t, 0).wait();
    y.add(at::ones({}));
    // 10 rows over 4 ranks are sent as 4 times 3
    EXPECT_EQ(mode.debug_string(), R"(aten::mm(f32[64, 10][S(0)], f32[10, 4][S(0)]) -> f32[64, 4][S(0)]
  redistribute_input(1, S(0)->R) implicit
    c10d_functional::all_gather_into_tensor(tp, 192 B)
redistribute_input(0, S(0)->R) explicit
  c10d_functional::all_gather_into_tensor(tp, 1024 B)
c10d::broadcast_(tp, 8 B)
aten::add.Tensor(f32[64, 4][S(0)], plain) -> f32[64, 4][S(0)]
)");
    EXPECT_EQ(mode.implicit_redistributions(), 1);
    EXPECT_EQ(mode.implicit_redistributions_by_op(), (std::map<std::string, int64_t>{{"aten::mm", 1}}));
  });
}

TEST(CommDebugMode, InputsRedistributedTogetherShareACollective) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto x = DTensor::from_local(at::ones({4}), mesh, {Partial()});
    const auto y = DTensor::from_local(at::ones({4}), mesh, {Partial()});
    CommDebugMode mode;
    at::maximum(x, y);
    EXPECT_EQ(mode.debug_string(), R"(aten::maximum(f32[4][P(sum)], f32[4][P(sum)]) -> f32[4][R]
  redistribute_input(0, P(sum)->R) implicit
  redistribute_input(1, P(sum)->R) implicit
    c10d_functional::all_reduce_coalesced(tp, 32 B)
)");
    EXPECT_EQ(mode.implicit_redistributions(), 2);
    EXPECT_EQ(mode.get_total_counts(), 1);
  });
}

// Later ops must not be listed below an op that threw.
TEST(CommDebugMode, OpThatThrowsEndsInTheTree) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto x = distribute_tensor(numbers(8, 10), mesh, {Shard(0)});
    const auto w = distribute_tensor(numbers(10, 4), mesh, {Shard(0)});
    CommDebugMode mode;
    {
      CommPolicyScope error(CommPolicy::Error);
      EXPECT_THROW(at::mm(x, w), ShardingError);
    }
    x.add(x);
    EXPECT_EQ(mode.debug_string(), R"(aten::mm(f32[8, 10][S(0)], f32[10, 4][S(0)])
aten::add.Tensor(f32[8, 10][S(0)], f32[8, 10][S(0)]) -> f32[8, 10][S(0)]
)");
    EXPECT_EQ(mode.implicit_redistributions(), 0);
  });
}

TEST(CommDebugMode, MisuseThrows) {
  CommDebugMode outer;
  EXPECT_THROW(outer.enter(), UsageError);
  {
    CommDebugMode inner;
    EXPECT_THROW(outer.exit(), UsageError);
  }
  outer.exit();
  EXPECT_THROW(outer.exit(), UsageError);
}

TEST(CommCounts, ComparesAndPrints) {
  CommCounts counts{{"c10d_functional.all_reduce", 2}, {"c10d.broadcast_", 0}};
  EXPECT_EQ(counts["c10d_functional.all_reduce"], 2);
  EXPECT_EQ(counts.of(CommKind::AllReduce), 2);
  EXPECT_EQ(counts.of(CommKind::AllReduce, Family::C10d), 0);
  EXPECT_EQ(counts["c10d._allgather_base_"], 0);
  EXPECT_EQ(counts.by_name().size(), 1u);
  counts.add(CommKind::Broadcast, Family::C10d);
  EXPECT_EQ(c10::str(counts), "{c10d.broadcast_: 1, c10d_functional.all_reduce: 2}");
  EXPECT_EQ(counts.total(), 3);
  EXPECT_THROW(counts["all_reduce"], UsageError);                          // unknown, always 0
  EXPECT_THROW((CommCounts{{"c10d_functional.barrier", 1}}), UsageError);  // is not counted
}

}  // namespace
}  // namespace tessera
