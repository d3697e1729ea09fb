#include "tessera/redistribute/detail/execute.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/records.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>

namespace tessera::redistribute {
namespace {

struct Counter : comm::Observer {
  int posted = 0;
  void on_post(const comm::Record& record) override { posted += record.counted(); }
};

// Distinct numbers. They stay positive in partial_of(), and every sum and product is exact.
at::Tensor dense(at::IntArrayRef sizes) {
  int64_t n = c10::multiply_integers(sizes);
  return at::arange(100, 100 + n, at::kDouble).reshape(sizes);
}

// The partial of rank i of n, such that the reduction of all n gives `value`.
at::Tensor partial_of(const at::Tensor& value, const Placement& p, int64_t n, int64_t i) {
  auto part_of_sum = [&](const at::Tensor& v) { return i + 1 < n ? at::full_like(v, i + 1) : v - n * (n - 1) / 2; };
  auto elements = at::arange(value.numel()).reshape(value.sizes());
  if (p.kind == Placement::Kind::MaskPartial) return at::where(elements % n == i, value, at::zeros_like(value));
  if (p.kind == Placement::Kind::NormPartial)
    return std::isinf(p.norm) ? value / (i + 1) : value * std::pow(n, -1 / p.norm);
  switch (p.op) {
    case ReduceOp::Sum:
      return part_of_sum(value);
    case ReduceOp::Avg:
      return part_of_sum(value * n);
    case ReduceOp::Product:
      return i == 0 ? value / (1 << (n - 1)) : at::full_like(value, 2);
    case ReduceOp::Max:
      return value - (elements + i) % n;
    case ReduceOp::Min:
      return value + (elements + i) % n;
  }
  return {};
}

// The local tensor of this rank. Partials of inner axes are made from the partials of outer axes.
at::Tensor local_of(at::Tensor value, PlacementsRef placements, const DeviceMesh& mesh) {
  auto coordinate = *mesh.get_coordinate();
  auto sizes = value.sizes().vec();
  for (size_t a = 0; a < placements.size(); a++)
    if (placements[a].is_partial()) value = partial_of(value, placements[a], mesh.shape()[a], coordinate[a]);
  for (int64_t d = 0; d < value.dim(); d++) {
    std::vector<int64_t> held;
    for (auto [begin, end] : local_ranges(placements, mesh.shape(), coordinate, d, sizes[d]))
      for (auto i = begin; i < end; i++) held.push_back(i);
    value = value.index_select(d, at::tensor(held, at::kLong));
  }
  return value;
}

SpecRef spec_of(const DeviceMesh& mesh, const at::Tensor& global, PlacementsRef placements) {
  return intern(mesh, placements, global.sizes(), global.strides(), global.scalar_type(), at::kCPU);
}

at::Tensor ready(const Local& local) {
  if (local.pending) funcol::wait(local.tensor, local.pending);
  return local.tensor;
}

void expect_same(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(at::allclose(found, expected, 1e-12, 1e-12)) << what << "\nfound\n"
                                                           << found << "\nexpected\n"
                                                           << expected;
}

// Redistributes, and checks the result and the number of collectives.
void check_redistribution(const DeviceMesh& mesh, const at::Tensor& global, const Placements& from,
                          const Placements& to) {
  auto what = c10::str(to_string(from), " -> ", to_string(to), " of ", global.sizes(), " at ", *mesh.get_coordinate());
  auto before = spec_of(mesh, global, from), after = spec_of(mesh, global, to);
  Sizes shape(mesh.shape().begin(), mesh.shape().end());
  if (!try_plan({shape, before->sizes, 8, from, to})) {
    EXPECT_THROW(plan_between(*before, *after), ShardingError) << what;
    return;
  }
  const auto& plan = plan_between(*before, *after);
  EXPECT_EQ(&plan, &plan_between(*before, *after));
  Counter counter;
  Local moved;
  auto local = local_of(global, from, mesh);
  {
    comm::ObserverScope scope(&counter);
    moved = execute(plan, local, *before, *after);
  }
  EXPECT_EQ(counter.posted, plan.collectives()) << what << ": " << plan;
  auto result = ready(moved);
  EXPECT_EQ(result.sizes(), at::IntArrayRef(after->local_sizes)) << what;
  if (after->has_partial()) {  // compare the reduced value
    Placements replicated(to.size(), Replicate());
    auto full = spec_of(mesh, global, replicated);
    expect_same(ready(execute(plan_between(*after, *full), result, *after, *full)), global, what);
  } else {
    expect_same(result, local_of(global, to, mesh), what);
  }
}

const std::vector<Placement> kAll = {
    Replicate(),
    Shard(0),
    Shard(1),
    Shard(0, 2),
    StridedShard(0, 2),
    StridedShard(1, 3),
    Partial(),
    Partial(ReduceOp::Avg),
    Partial(ReduceOp::Max),
    Partial(ReduceOp::Min),
    Partial(ReduceOp::Product),
    NormPartial(2),
    NormPartial(std::numeric_limits<double>::infinity()),
    MaskPartial(),
};

void on_mesh(std::vector<int64_t> shape, const std::function<void(const DeviceMesh&)>& body) {
  testing::run_ranks(c10::multiply_integers(shape), [&](testing::Rank& me) { body(me.mesh(shape)); });
}

TEST(Execute, FromEveryPlacementToEveryPlacement) {
  for (int64_t n : {1, 2, 3, 4})
    on_mesh({n}, [](const DeviceMesh& mesh) {
      for (auto sizes : {std::vector<int64_t>{5, 7}, {8, 12}, {2, 1}, {0, 3}})
        for (const auto& from : kAll)
          for (const auto& to : kAll) check_redistribution(mesh, dense(sizes), {from}, {to});
    });
}

TEST(Execute, TwoMeshAxes) {
  const std::vector<Placement> some = {Replicate(),        Shard(0),           Shard(1),
                                       StridedShard(0, 2), StridedShard(0, 3), Partial()};
  for (auto shape : {std::vector<int64_t>{2, 2}, {2, 3}})
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      auto global = dense({7, 5});
      for (const auto& a : some)
        for (const auto& b : some)
          for (const auto& c : some)
            for (const auto& d : some) check_redistribution(mesh, global, {a, b}, {c, d});
    });
}

TEST(Execute, RandomSamplesOnLargerMeshes) {
  for (auto shape : {std::vector<int64_t>{2, 2}, {2, 3}, {1, 2}, {2, 2, 2}, {1, 2, 1, 2}})
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      std::mt19937 random(20240607);  // the same on every rank
      auto any = [&] {
        Placements placements;
        for (int64_t a = 0; a < mesh.ndim(); a++) placements.push_back(kAll[random() % kAll.size()]);
        return placements;
      };
      for (int i = 0; i < 200; i++) {
        std::vector<int64_t> sizes{static_cast<int64_t>(random() % 10), static_cast<int64_t>(1 + random() % 9), 3};
        auto from = any(), to = any();
        check_redistribution(mesh, dense(sizes), from, to);
      }
    });
}

TEST(Execute, PermutedTensorsKeepTheirMemoryOrder) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    auto global = dense({5, 7, 4}).permute({2, 0, 1});  // (4, 5, 7)
    for (const auto& from : {Replicate(), Shard(0), Shard(1), Partial()})
      for (const auto& to : {Replicate(), Shard(0), Shard(2)}) {
        if (from == to) continue;
        check_redistribution(mesh, global, {from}, {to});
        auto before = spec_of(mesh, global, {from}), after = spec_of(mesh, global, {to});
        auto result = ready(execute(plan_between(*before, *after), local_of(global, {from}, mesh), *before, *after));
        EXPECT_TRUE(result.permute({1, 2, 0}).is_contiguous()) << from << "->" << to;
      }
  });
}

TEST(Execute, IntegersStayExact) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    auto global = dense({7}).to(at::kLong);
    for (const auto& via : {Partial(), Partial(ReduceOp::Avg), Partial(ReduceOp::Max)}) {
      auto replicated = spec_of(mesh, global, {Replicate()}), partial = spec_of(mesh, global, {via});
      auto there = ready(execute(plan_between(*replicated, *partial), global, *replicated, *partial));
      auto back = ready(execute(plan_between(*partial, *replicated), there, *partial, *replicated));
      EXPECT_TRUE(at::equal(back, global)) << via;
    }
  });
}

TEST(Execute, UnchangedTensorsAreSharedAndShardsAreCopied) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto global = dense({4, 4});
    auto replicated = spec_of(mesh, global, {Replicate()}), sharded = spec_of(mesh, global, {Shard(0)}),
         mean = spec_of(mesh, global, {Partial(ReduceOp::Avg)});
    auto run = [&](const SpecRef& from, const SpecRef& to) {
      return execute(plan_between(*from, *to), global, *from, *to);
    };
    EXPECT_TRUE(run(replicated, replicated).tensor.is_same(global));
    EXPECT_TRUE(run(replicated, mean).tensor.is_same(global));
    auto slice = run(replicated, sharded);
    EXPECT_FALSE(slice.tensor.is_alias_of(global));
    EXPECT_FALSE(slice.pending);
    EXPECT_TRUE(slice.tensor.is_contiguous());
  });
}

TEST(Execute, LastCollectiveStaysInFlight) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto global = dense({6, 4});
    auto sharded = spec_of(mesh, global, {Shard(0)}), replicated = spec_of(mesh, global, {Replicate()});
    auto local = local_of(global, {Shard(0)}, mesh);
    auto moved = execute(plan_between(*sharded, *replicated), local, *sharded, *replicated);
    EXPECT_TRUE(moved.pending);
    expect_same(ready(moved), global, "all_gather");
  });
}

TEST(ExecuteMany, CoalescesCollectives) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    struct Case {
      Placements from, to;
      std::vector<int64_t> sizes;
    };
    const std::vector<Case> cases = {
        {{Shard(0), Replicate()}, {Replicate(), Replicate()}, {5, 3}},
        {{Shard(1), Replicate()}, {Replicate(), Shard(0)}, {3, 7}},
        {{StridedShard(0, 2), Replicate()}, {Replicate(), Replicate()}, {9}},
        {{Partial(), Replicate()}, {Replicate(), Replicate()}, {4}},
        {{Partial(ReduceOp::Avg), Replicate()}, {Replicate(), Replicate()}, {2, 2}},
        {{NormPartial(2), Replicate()}, {Replicate(), Replicate()}, {3}},
        {{Partial(), Replicate()}, {Shard(0), Replicate()}, {5, 2}},
        {{Partial(), Replicate()}, {Shard(1), Replicate()}, {5, 6}},
        {{Replicate(), Shard(0)}, {Replicate(), Shard(1)}, {6, 6}},
        {{Replicate(), Shard(0)}, {Replicate(), Shard(0)}, {6, 6}},
    };
    std::vector<const Plan*> plans;
    std::vector<at::Tensor> locals;
    std::vector<SpecRef> kept;
    std::vector<const TensorSpec*> from, to;
    for (const auto& c : cases) {
      auto global = dense(c.sizes);
      kept.push_back(spec_of(mesh, global, c.from));
      from.push_back(kept.back().get());
      kept.push_back(spec_of(mesh, global, c.to));
      to.push_back(kept.back().get());
      plans.push_back(&plan_between(*from.back(), *to.back()));
      locals.push_back(local_of(global, c.from, mesh));
    }
    Counter counter;
    std::vector<Local> moved;
    {
      comm::ObserverScope scope(&counter);
      moved = execute_many(plans, locals, from, to);
    }
    EXPECT_EQ(counter.posted, 4);  // all_gather, all_reduce, reduce_scatter, all_to_all
    for (size_t i = 0; i < cases.size(); i++)
      expect_same(ready(moved[i]), local_of(dense(cases[i].sizes), cases[i].to, mesh), to_string(cases[i].from));
  });
}

}  // namespace
}  // namespace tessera::redistribute
