#include "tests/rules/family_test.h"

#include <limits>

namespace tessera::testing {
namespace {

TEST(ReductionRules, HoldByBruteForce) {
  auto x = numbers({5, 3}), y = numbers({2, 5, 3}), t = numbers({3, 5}).t();
  auto dims = [](std::vector<int64_t> v) { return c10::IValue(std::move(v)); };
  c10::IValue none;
  auto type = [](c10::ScalarType s) { return c10::IValue(static_cast<int64_t>(s)); };
  double inf = std::numeric_limits<double>::infinity();
  std::vector<Sample> samples = {
      {"aten::sum", {x}, {}},
      {"aten::sum.dim_IntList", {y, dims({1}), false}, {}},
      {"aten::sum.dim_IntList", {y, dims({0, -1}), true}, {}},
      {"aten::sum.dim_IntList", {t, none, false}, {}},
      {"aten::mean", {x}, {}},
      {"aten::mean.dim", {y, dims({1}), false}, {}},
      {"aten::mean.dim", {y, dims({0, 2}), true}, {}},
      {"aten::mean.dim", {x, none, false, type(at::kFloat)}, {}},
      {"aten::prod", {x}, {}},
      {"aten::prod.dim_int", {x, 0, false}, {}},
      {"aten::prod.dim_int", {x, 1, true}, {}},
      {"aten::amax", {x, dims({0}), false}, {}},
      {"aten::amax", {y, dims({1, 2}), true}, {}},
      {"aten::amin", {x, dims({1}), false}, {}},
      {"aten::amin", {integers({5, 3}), dims({0}), true}, {}},
      {"aten::amax", {x, dims({}), false}, {}},
      {"aten::max", {x}, {}},
      {"aten::min", {integers({5, 3}, 100)}, {}},
      {"aten::var.correction", {x, dims({1}), 1, false}, {}},
      {"aten::std.correction", {y, dims({0, 1}), 0, true}, {}},
      {"aten::var_mean.correction", {x, dims({0}), 1, false}, {}},
      {"aten::std_mean.correction", {y, dims({0, 1}), 0, true}, {}},
      {"aten::nansum", {x, dims({0}), false}, {}},
      {"aten::nansum", {x, none, false}, {}},
      {"aten::count_nonzero.dim_IntList", {integers({5, 3}, 3), dims({0})}, {}},
      {"aten::linalg__powsum", {y, 3.0, dims({1}), true}, {}},
      {"aten::aminmax", {x, 0, true}, {}},
      {"aten::aminmax", {x, none, false}, {}},
      {"aten::_aminmax", {x}, {}},
      {"aten::_aminmax.dim", {x, 1, false}, {}},
      {"aten::nanmedian", {x}, {}},
      {"aten::nanmedian.dim", {x, 0, true}, {}},
      {"aten::mode", {integers({5, 3}, 3), 0, false}, {}},
      {"aten::kthvalue", {x, 2, 0, true}, {}},
      {"aten::trace", {x}, {}},
      {"aten::logsumexp", {x, dims({1}), false}, {}},
      {"aten::max.dim", {x, 0, false}, {}},
      {"aten::min.dim", {x, 1, true}, {}},
      {"aten::argmax", {x, 1, false}, {}},
      {"aten::argmin", {x, none, false}, {}},
      {"aten::median", {x}, {}},
      {"aten::median.dim", {x, 0, true}, {}},
      {"aten::all", {mask({5, 3})}, {}},
      {"aten::all.dim", {mask({5, 3}), 0, false}, {}},
      {"aten::all.dims", {mask({5, 3}), dims({0, 1}), true}, {}},
      {"aten::any", {mask({5, 3})}, {}},
      {"aten::any.dim", {mask({5, 3}), 1, true}, {}},
      {"aten::any.dims", {mask({5, 3}), dims({0}), false}, {}},
  };
  // Permuted inputs: the result has the memory order of the dims that are not reduced.
  auto turned = numbers({3, 2, 5}).permute({1, 2, 0}), flat = numbers({3, 5, 2}).permute({1, 2, 0});
  for (const auto& z : {turned, flat})
    for (int64_t d : {0, 1, 2})
      for (bool keep : {false, true}) {
        for (const auto* op : {"aten::sum.dim_IntList", "aten::mean.dim", "aten::amax", "aten::logsumexp"})
          samples.push_back({op, {z, dims({d}), keep}, {}});
        for (const auto* op : {"aten::max.dim", "aten::argmax", "aten::prod.dim_int", "aten::median.dim"})
          samples.push_back({op, {z, d, keep}, {}});
        samples.push_back({"aten::any.dim", {z.gt(0.5), d, keep}, {}});
        samples.push_back({"aten::var.correction", {z, dims({d}), 0, keep}, {}});
        samples.push_back({"aten::var_mean.correction", {z, dims({d}), 0, keep}, {}});
        samples.push_back({"aten::linalg_vector_norm", {z, 2.0, dims({d}), keep}, {}});
      }
  for (double p : {2.0, 1.0, 3.5, 0.0, inf, -1.0}) {
    samples.push_back({"aten::norm.Scalar", {x, p}, {}});
    samples.push_back({"aten::norm.ScalarOpt_dim", {x, p, dims({0}), true}, {}});
    samples.push_back({"aten::norm.ScalarOpt_dim_dtype", {x, p, dims({1}), false, type(at::kDouble)}, {}});
    samples.push_back({"aten::norm.ScalarOpt_dtype", {x, p, type(at::kDouble)}, {}});
    samples.push_back({"aten::linalg_vector_norm", {y, p, dims({1, 2}), false}, {}});
    samples.push_back({"aten::linalg_vector_norm", {x, p, none, true}, {}});
  }
  expect_family_holds("reduction", samples);
}

// A mean of means is wrong for uneven shards: 5 over 3 ranks is 2, 2, 1.
TEST(ReductionRules, MeanOfAShardedDimIsASumOverTheGlobalCount) {
  auto rule = rules::registry()
                  .find("aten::mean.dim")
                  ->fn(call_query({"aten::mean.dim", {numbers({5, 3}), std::vector<int64_t>{0}, false}, {}}));
  auto sharded = std::find_if(rule.strategies.begin(), rule.strategies.end(),
                              [](const auto& strategy) { return strategy.in[0] == Shard(0); });
  ASSERT_NE(sharded, rule.strategies.end());
  EXPECT_EQ(sharded->out[0], Partial(ReduceOp::Sum));
  EXPECT_TRUE(sharded->special);
  EXPECT_EQ(rule.special_args[0].toDouble(), 5.0);
}

}  // namespace
}  // namespace tessera::testing
