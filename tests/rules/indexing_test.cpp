#include "tests/rules/family_test.h"

namespace tessera::testing {
namespace {

c10::IValue indices(std::vector<std::optional<at::Tensor>> list) {
  c10::List<std::optional<at::Tensor>> result;
  for (auto& t : list) result.push_back(t);
  return result;
}

TEST(IndexingRules, HoldByBruteForce) {
  auto x = numbers({5, 3}), y = numbers({5, 4, 3}), i = integers({6}, 3), grid = integers({2, 1}, 4);
  auto places = integers({5, 2}, 3), src = numbers({5, 2});
  std::vector<Sample> samples = {
      {"aten::index_select", {y, 1, i}, {}},
      {"aten::index_select", {numbers({5}), 0, i}, {}},
      {"aten::index_select", {numbers({3, 5}).t(), 1, i}, {}},
      {"aten::gather", {numbers({3, 5}).t(), 1, integers({2, 5}, 3).t()}, {}},
      {"aten::gather", {x, 1, places}, {}},
      {"aten::gather", {x, 0, integers({4, 2}, 5)}, {}},
      {"aten::take", {x, integers({4, 2}, 15)}, {}},
      {"aten::index.Tensor", {y, indices({std::nullopt, i})}, {}},
      {"aten::index.Tensor", {y, indices({i})}, {}},
      {"aten::index.Tensor", {y, indices({i, std::nullopt, integers({1}, 3)})}, {}},
      {"aten::index.Tensor", {y, indices({grid, i.slice(0, 0, 3)})}, {}},
      {"aten::index.Tensor", {numbers({4, 5}).t(), indices({std::nullopt, i})}, {}},
  };
  for (const std::string in_place : {"", "_"}) {
    auto op = [&](const std::string& name, const std::string& overload = "") {
      return "aten::" + name + in_place + (overload.empty() ? "" : "." + overload);
    };
    samples.insert(samples.end(),
                   {
                       {op("scatter", "src"), {x, 1, integers({5, 1}, 3), src}, {}},
                       {op("scatter", "value"), {x, 1, places, 0.5}, {}},
                       {op("scatter", "reduce"), {x, 1, places, src, "multiply"}, {}},
                       {op("scatter", "value_reduce"), {x, 1, places, 0.5, "add"}, {}},
                       {op("scatter_add"), {x, 1, places, src}, {}},
                       {op("scatter_add"), {numbers({3, 5}).t(), 1, places, src}, {}},
                       {op("index_add"), {numbers({3, 5}).t(), 1, i, numbers({5, 6}), 0.5}, {}},
                       {op("scatter", "src"), {numbers({3, 5}).t(), 1, places, src}, {}},
                       {op("scatter", "value"), {numbers({3, 5}).t(), 1, places, 0.5}, {}},
                       {op("index_copy"), {numbers({3, 5}).t(), 1, integers({1}, 3), numbers({5, 1})}, {}},
                       {op("index_fill", "int_Scalar"), {numbers({3, 5}).t(), 1, i, 0.5}, {}},
                       {op("index_put"), {numbers({3, 5}).t(), indices({std::nullopt, i}), numbers({6}), true}, {}},
                       {op("scatter_reduce", "two"), {x, 1, places, src, "amax"}, {}},
                       {op("scatter_reduce", "two"), {x, 0, integers({4, 3}, 5), numbers({4, 3}), "mean", false}, {}},
                       {op("index_reduce"), {y, 1, i, numbers({5, 6, 3}), "prod"}, {}},
                       {op("scatter_add"), {x, 0, integers({4, 3}, 5), numbers({4, 3})}, {}},
                       {op("index_add"), {y, 1, i, numbers({5, 6, 3}), 0.5}, {}},
                       {op("index_copy"), {y, 1, integers({1}, 4), numbers({5, 1, 3})}, {}},
                       {op("index_fill", "int_Scalar"), {y, 1, i, 0.5}, {}},
                       {op("index_fill", "int_Tensor"), {y, 1, i, numbers({})}, {}},
                       {op("index_put"), {y, indices({std::nullopt, i}), numbers({6, 3}), true}, {}},
                       {op("index_put"), {y, indices({integers({1}, 4)}), numbers({1, 4, 3}), false}, {}},
                       {op("index_put"), {y, indices({std::nullopt, i}), numbers({}), true}, {}},
                       {op("index_put"), {x, indices({mask({5, 3})}), numbers({}), false}, {}},
                   });
  }
  auto sorted = std::get<0>(numbers({7}).sort());
  samples.insert(samples.end(), {
                                    {"aten::searchsorted.Tensor", {sorted, x}, {}},
                                    {"aten::searchsorted.Tensor", {std::get<0>(numbers({5, 7}).sort(-1)), x}, {}},
                                    {"aten::bucketize.Tensor", {y, sorted}, {}},
                                    {"aten::isin.Tensor_Tensor", {integers({5, 3}, 9), integers({4}, 9)}, {}},
                                    {"aten::isin.Tensor_Scalar", {integers({5, 3}, 9), 3}, {}},
                                });
  samples.push_back({"aten::_index_put_impl", {y, indices({std::nullopt, i}), numbers({6, 3}), true}, {}});
  samples.push_back({"aten::_index_put_impl_", {y, indices({i.slice(0, 0, 3)}), numbers({3, 4, 3}), true}, {}});
  expect_family_holds("indexing", samples);
}

// The size of the result depends on the data.
TEST(IndexingRules, AMaskIndexIsGathered) {
  Sample sample{"aten::index.Tensor", {numbers({5, 3}), indices({mask({5})})}, {}};
  EXPECT_TRUE(rules::registry().find(sample.op)->fn(call_query(sample)).gathered);
}

}  // namespace
}  // namespace tessera::testing
