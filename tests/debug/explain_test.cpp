// The text of explain(): all strategies with costs, the chosen one, and the redistributions that it needs.
#include "tessera/debug/explain.h"

#include "tessera/base/error.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/ranks.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <regex>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

template <class F>
std::string usage_error_of(F f) {
  try {
    f();
  } catch (const UsageError& e) {
    return e.what_without_backtrace();
  }
  return "nothing was thrown";
}

// Removes the costs: tests do not depend on the cost model.
std::string without_costs(const std::string& text) {
  return std::regex_replace(text, std::regex("( {4}[* ] ) *[0-9.]+ us"), "$1. us");
}

TEST(Explain, ShowsStrategiesChoiceAndRedistributions) {
  run_ranks(4, [](Rank& me) {
    const auto mesh = me.mesh("tp=4");
    const auto x = distribute_tensor(at::ones({64, 10}), mesh, {Shard(0)});
    const auto w = distribute_tensor(at::ones({10, 4}), mesh, {Shard(0)});
    CommDebugMode mode;
    const auto text = without_costs(explain("aten::mm", {x, w}));
    EXPECT_EQ(mode.get_total_counts(), 0);
    EXPECT_EQ(mode.debug_string(), "");
    EXPECT_EQ(text, R"(aten::mm(f32[64, 10][S(0)], f32[10, 4][S(0)]) on mesh(tp=4)
  axis tp, 4 ranks
      . us  R, R -> R
    * . us  S(0), R -> S(0)
      . us  R, S(1) -> S(1)
      . us  S(1), S(0) -> P(sum)
      . us  P(sum), R -> P(sum)
  input 1: tp: all_gather S(0)->R 144 B
  result: [64, 4][S(0)]
)");
    DTensor y = at::mm(x, w);  // the op does the same
    EXPECT_EQ(mode.get_total_counts(), 1);
    EXPECT_EQ(y.placements()[0], Shard(0));
  });
}

TEST(Explain, EachAxisHasItsOwnChoice) {
  run_ranks(4, [](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    const auto x = distribute_tensor(at::ones({8, 10}), mesh, {Shard(0), Replicate()});
    const auto w = distribute_tensor(at::ones({10, 4}), mesh, {Replicate(), Shard(1)});
    const auto text = explain("aten::mm", {x, w});
    EXPECT_CONTAINS(text, "axis dp, 2 ranks");
    EXPECT_CONTAINS(text, "axis tp, 2 ranks");
    EXPECT_EQ(text.find("input"), std::string::npos) << text;
    EXPECT_CONTAINS(text, "result: [8, 4][S(0), S(1)]");
  });
}

TEST(Explain, DefaultArgumentsViewsAndErrors) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto x = distribute_tensor(at::ones({8, 10}), mesh, {Shard(0)});
    const auto terms = DTensor::from_local(at::ones({8, 10}), mesh, {Partial()});
    EXPECT_CONTAINS(explain("aten::add.Tensor", {x, x}), "result: [8, 10][S(0)]");  // without alpha
    EXPECT_CONTAINS(explain("aten::t", {x}), "result: [10, 8][S(1)]");
    EXPECT_CONTAINS(explain("aten::chain_matmul", {std::vector<at::Tensor>{x, x}}), "decomposes into other ops");
    const auto functional = explain("aten::mul_.Tensor", {terms, terms});  // the written tensor is partial
    EXPECT_CONTAINS(functional, "impossible");
    EXPECT_CONTAINS(functional, "aten::mul.Tensor runs, and its result is copied into the argument");
  });
}

TEST(Explain, MisuseThrows) {
  run_ranks(2, [](Rank& me) {
    const auto x = distribute_tensor(at::ones({8, 10}), me.mesh("tp=2"), {Shard(0)});
    EXPECT_CONTAINS(usage_error_of([&] { explain("aten::add", {x, x}); }), "aten::add.Tensor");
    EXPECT_CONTAINS(usage_error_of([&] { explain("aten::no_such_op", {x}); }), "unknown op");
    EXPECT_CONTAINS(usage_error_of([&] { explain("aten::mm", {x}); }), "'mat2' is missing");
    EXPECT_CONTAINS(usage_error_of([&] { explain("aten::mm", {x, x, x}); }), "3 arguments");
    EXPECT_CONTAINS(usage_error_of([&] { explain("aten::mm", {x, 1}); }), "'mat2' is a Int");
    EXPECT_CONTAINS(usage_error_of([&] { explain("aten::relu", {at::ones({2})}); }), "distributed");
  });
}

}  // namespace
}  // namespace tessera
