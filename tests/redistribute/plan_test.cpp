#include "tessera/redistribute/detail/plan.h"

#include "tessera/base/error.h"
#include "tessera/redistribute/detail/cost.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>

namespace tessera::redistribute {
namespace {

constexpr int64_t kFloat = 4;

Plan plan(Sizes mesh, Sizes sizes, const char* from, const char* to) {
  return make_plan({mesh, sizes, kFloat, parse_placements(from), parse_placements(to)});
}
std::string text(Sizes mesh, Sizes sizes, const char* from, const char* to) {
  return to_string(plan(mesh, sizes, from, to), {"dp", "tp", "cp"});
}

TEST(Plan, OneMeshAxis) {
  const std::tuple<const char*, const char*, const char*> kMoves[] = {
      {"R", "R", "nothing"},
      {"R", "S(0)", "dp: slice R->S(0)"},
      {"R", "SS(0,2)", "dp: slice R->SS(0,2)"},
      {"R", "P(sum)", "dp: divide R->P(sum)"},
      {"R", "P(avg)", "dp: nothing R->P(avg)"},
      {"R", "P(max)", "dp: nothing R->P(max)"},
      {"R", "P(norm,2)", "dp: divide R->P(norm,2)"},
      {"R", "P(norm,inf)", "dp: nothing R->P(norm,inf)"},
      {"S(0)", "R", "dp: all_gather S(0)->R 160 B"},
      {"S(0)", "S(0)", "nothing"},
      {"S(0)", "S(1)", "dp: all_to_all S(0)->S(1) 80 B"},
      {"S(0)", "SS(0,2)", "dp: all_to_all S(0)->SS(0,2) 80 B"},
      {"S(0)", "SS(0,1)", "dp: nothing S(0)->SS(0,1)"},
      {"P(sum)", "R", "dp: all_reduce P(sum)->R 320 B"},
      {"P(mask)", "R", "dp: all_reduce P(mask)->R 320 B"},
      {"P(norm,2)", "S(1)", "dp: reduce_scatter P(norm,2)->S(1) 160 B"},
      {"P(sum)", "S(0)", "dp: reduce_scatter P(sum)->S(0) 160 B"},
      {"P(sum)", "P(sum)", "nothing"},
  };
  for (const auto& [from, to, expected] : kMoves) EXPECT_EQ(text({2}, {8, 10}, from, to), expected);
}

TEST(Plan, ImpossibleRedistributionsThrow) {
  for (auto [from, to] : {std::pair{"S(0)", "P(sum)"},
                          {"P(sum)", "P(max)"},
                          {"P(sum)", "P(mask)"},
                          {"R", "P(product)"},
                          {"R", "P(mask)"},
                          {"P(norm,2)", "P(norm,3)"}}) {
    EXPECT_THROW(plan({2}, {8}, from, to), ShardingError) << from << " -> " << to;
    EXPECT_EQ(try_plan({{2}, {8}, kFloat, parse_placements(from), parse_placements(to)}), nullptr);
  }
  EXPECT_THROW(plan({2, 2}, {8}, "[S(0), R]", "[P(sum), R]"), ShardingError);
  EXPECT_THROW(plan({2, 2}, {8}, "R", "R"), UsageError);
  try {
    plan({2, 2}, {8}, "[R, S(0)]", "[R, P(sum)]");
    FAIL();
  } catch (const ShardingError& e) {
    EXPECT_NE(std::string(e.what()).find("on mesh axis 1 S(0) cannot become P(sum)"), std::string::npos) << e.what();
  }
}

TEST(Plan, SeveralMeshAxes) {
  const std::tuple<const char*, const char*, const char*> kMoves[] = {
      // Partials of one kind are reduced over all axes at once.
      {"[P(sum), P(sum)]", "[R, R]", "dp+tp: all_reduce P(sum)->R 480 B"},
      // Of two kinds of partials, the inner one is reduced first.
      {"[P(sum), P(max)]", "[R, R]", "tp: all_reduce P(max)->R 320 B; dp: all_reduce P(sum)->R 320 B"},
      // The inner shard of a dim is gathered before the outer one.
      {"[S(0), S(0)]", "[R, R]", "tp: all_gather S(0)->R 80 B; dp: all_gather S(0)->R 160 B"},
      {"[S(0), S(0)]", "[R, S(0)]", "tp: all_gather S(0)->R 80 B; dp: all_gather S(0)->R 160 B; tp: slice R->S(0)"},
      {"[R, R]", "[S(0), S(0)]", "dp: slice R->S(0); tp: slice R->S(0)"},
      // FSDP over tensor parallel: one collective, because the strided shard is the last one.
      {"[SS(0,2), S(0)]", "[R, S(0)]", "dp: all_gather SS(0,2)->R 80 B"},
      {"[P(sum), S(0)]", "[SS(0,2), S(0)]", "dp: reduce_scatter P(sum)->SS(0,2) 80 B"},
      {"[R, R]", "[SS(0,2), S(0)]", "tp: slice R->S(0); dp: slice R->SS(0,2)"},
      {"[R, R]", "[P(sum), S(0)]", "tp: slice R->S(0); dp: divide R->P(sum)"},
      // A slice first leaves less to reduce.
      {"[P(sum), R]", "[R, S(0)]", "tp: slice R->S(0); dp: all_reduce P(sum)->R 160 B"},
      // A small tensor is reduced at once; a large one is reduced in halves.
      {"[P(sum), P(sum)]", "[S(0), S(1)]", "dp+tp: all_reduce P(sum)->R 480 B; dp: slice R->S(0); tp: slice R->S(1)"},
  };
  for (const auto& [from, to, expected] : kMoves) EXPECT_EQ(text({2, 2}, {8, 10}, from, to), expected);
  EXPECT_EQ(text({2, 2}, {1024, 1024}, "[P(sum), P(sum)]", "[S(0), S(1)]"),
            "tp: reduce_scatter P(sum)->S(1) 2097152 B; dp: reduce_scatter P(sum)->S(0) 1048576 B");
  EXPECT_EQ(text({8, 8}, {1024, 1024}, "[P(sum), R]", "[R, R]"),
            "tp: slice R->S(0); dp: all_reduce P(sum)->R 917504 B; tp: all_gather S(0)->R 3670016 B");
  EXPECT_THROW(plan({2, 2}, {8}, "[P(sum), P(max)]", "[R, P(max)]"), ShardingError);
}

// reduce_scatter + all_gather must not be cheaper than all_reduce.
TEST(Plan, CostsOfMoves) {
  double bytes = 1 << 20;
  auto reduce = step_cost(Move::AllReduce, 4, bytes);
  auto scatter = step_cost(Move::ReduceScatter, 4, bytes), gather = step_cost(Move::AllGather, 4, bytes / 4);
  EXPECT_GT(scatter, reduce / 2);
  EXPECT_LT(scatter, reduce);
  EXPECT_LE(reduce, scatter + gather);
  for (auto move : {Move::AllGather, Move::AllReduce, Move::ReduceScatter, Move::AllToAll})
    EXPECT_LT(step_cost(move, 1, bytes), 1);
}

// All placements of an axis of one rank have the same local tensor.
TEST(Plan, AxesOfOneRankNeverMoveData) {
  EXPECT_EQ(text({1}, {8}, "S(0)", "R"), "dp: nothing S(0)->R");
  EXPECT_EQ(text({1}, {8}, "R", "P(sum)"), "dp: nothing R->P(sum)");
  EXPECT_EQ(text({1}, {8}, "P(norm,2)", "R"), "dp: nothing P(norm,2)->R");
  EXPECT_EQ(text({1}, {8, 8}, "S(0)", "S(1)"), "dp: nothing S(0)->S(1)");
  EXPECT_EQ(text({1}, {8, 8}, "P(sum)", "S(1)"), "dp: nothing P(sum)->S(1)");
  EXPECT_EQ(text({1, 1}, {8}, "[P(sum), P(sum)]", "[R, R]"), "dp: nothing P(sum)->R; tp: nothing P(sum)->R");
  EXPECT_EQ(text({1, 2}, {8}, "[P(sum), P(sum)]", "[R, R]"), "dp: nothing P(sum)->R; tp: all_reduce P(sum)->R 32 B");
  EXPECT_EQ(text({1, 2}, {8}, "[S(0), S(0)]", "[R, S(0)]"), "dp: nothing S(0)->R");
  EXPECT_THROW(plan({1}, {8}, "S(0)", "P(sum)"), ShardingError);  // as with several ranks
}

struct Drawn {
  Sizes mesh, sizes;
};

Drawn draw_geometry() {
  Drawn drawn;
  for (int axes = *rc::gen::elementOf(std::vector<int>{1, 2, 3}); axes > 0; axes--)
    drawn.mesh.push_back(*rc::gen::elementOf(std::vector<int64_t>{1, 2, 2, 3, 4, 8}));
  int64_t scale = *rc::gen::elementOf(std::vector<int64_t>{1, 64, 512});
  for (int dims = *rc::gen::inRange(1, 4); dims > 0; dims--)
    drawn.sizes.push_back(*rc::gen::inRange<int64_t>(1, 12) * scale);
  return drawn;
}

Placements draw_placements(const Drawn& drawn) {
  Placements placements;
  for (size_t a = 0; a < drawn.mesh.size(); a++) {
    auto d = *rc::gen::inRange<int64_t>(0, static_cast<int64_t>(drawn.sizes.size()));
    // The factor is often the size of an axis, so that strided shards count other axes.
    auto factor = *rc::gen::elementOf(std::vector<int64_t>{1, 2, drawn.mesh.front(), drawn.mesh.back()});
    switch (*rc::gen::inRange(0, 8)) {
      case 0:
        placements.push_back(Shard(d, factor));
        break;
      case 1:
        placements.push_back(StridedShard(d, factor));
        break;
      case 2:
      case 3:
        placements.push_back(Shard(d));
        break;
      case 4:
        placements.push_back(Replicate());
        break;
      case 5:
      case 6:
        placements.push_back(Partial());
        break;
      default:
        placements.push_back(Partial(ReduceOp::Max));
    }
  }
  return placements;
}

// Replaces partials that cannot be made, so that most random cases have a plan.
Placements draw_after(const Placements& from, const Drawn& drawn) {
  auto to = draw_placements(drawn);
  for (size_t a = 0; a < to.size(); a++)
    if (to[a].is_partial() && !from[a].is_replicate()) to[a] = from[a];
  return to;
}

// Applies the steps and checks that each one is legal.
Placements follow(const Plan& plan, Placements state) {
  for (const auto& step : plan.steps)
    for (auto axis : step.axes) {
      RC_ASSERT(state[axis] == step.from);
      state[axis] = step.to;
    }
  return state;
}

TEST(PlanLaws, IdentityCostsNothingAndPlansReachTheGoal) {
  EXPECT_TRUE(rc::check([] {
    auto drawn = draw_geometry();
    auto from = draw_placements(drawn), to = draw_placements(drawn);
    RC_ASSERT(make_plan({drawn.mesh, drawn.sizes, kFloat, from, from}).cost == 0);
    auto plan = try_plan({drawn.mesh, drawn.sizes, kFloat, from, to});
    bool forbidden = false;
    for (size_t a = 0; a < from.size(); a++)
      forbidden |= to[a].is_partial() && from[a] != to[a] && !from[a].is_replicate();
    for (size_t a = 0; a < from.size(); a++)  // the outer partial cannot be reduced before the inner one
      for (size_t b = a + 1; b < from.size(); b++)
        forbidden |=
            from[a].is_partial() && from[a] != to[a] && from[b].is_partial() && from[a] != from[b] && from[b] == to[b];
    RC_ASSERT((plan == nullptr) == forbidden);
    if (plan) RC_ASSERT(follow(*plan, from) == to);
  }));
}

TEST(PlanLaws, TriangleInequalityHolds) {
  EXPECT_TRUE(rc::check([] {
    auto drawn = draw_geometry();
    auto a = draw_placements(drawn), b = draw_after(a, drawn), c = draw_after(b, drawn);
    auto plan = [&](const Placements& from, const Placements& to) {
      return try_plan({drawn.mesh, drawn.sizes, kFloat, from, to});
    };
    auto direct = plan(a, c), first = plan(a, b), second = plan(b, c);
    bool planned = direct && first && second;
    RC_PRE(planned);
    RC_LOG() << to_string(a) << to_string(b) << to_string(c) << "\n" << *direct << "\n" << *first << "\n" << *second;
    RC_ASSERT(direct->cost <= first->cost + second->cost + 1e-6);
  }));
}

TEST(PlanLaws, ShardsAreExchangedByAllToAll) {
  for (int64_t n : {2, 3, 4, 8})
    for (int64_t i = 0; i < 3; i++)
      for (int64_t j = 0; j < 3; j++)
        for (int64_t rows : {1, 1024}) {
          auto plan = make_plan(
              {{2, n}, {8 * n * rows, 16 * n, 24 * n}, kFloat, {Replicate(), Shard(i)}, {Replicate(), Shard(j)}});
          for (const auto& step : plan.steps) EXPECT_EQ(step.move, Move::AllToAll) << plan;
          EXPECT_EQ(plan.collectives(), i == j ? 0 : 1) << plan;
        }
}

}  // namespace
}  // namespace tessera::redistribute
