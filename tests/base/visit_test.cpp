#include "tessera/base/visit.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

struct Batch {
  at::Tensor tokens;
  std::optional<at::Tensor> mask;
  int64_t size = 0;
  friend void tessera_visit(Batch& b, auto&& field) { field(b.tokens), field(b.mask); }
};
struct Opaque {
  at::Tensor hidden;
};

TEST(Visit, FindsTensorsInOrderAtAnyDepth) {
  auto t = [](int n) { return at::ones({n}); };
  std::tuple<at::Tensor, std::vector<at::Tensor>, std::optional<std::pair<at::Tensor, int>>, Batch> value{
      t(1), {t(2), t(3)}, {{t(4), 7}}, Batch{t(5), t(6), 9}};
  std::vector<int64_t> sizes;
  for (const auto& each : tensors_of(value)) sizes.push_back(each.numel());
  EXPECT_EQ(sizes, (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
}

TEST(Visit, AssignReplacesTensors) {
  std::tuple<at::Tensor, int, std::vector<at::Tensor>> value{at::ones({1}), 3, {at::ones({2})}};
  auto found = tensors_of(value);
  std::swap(found[0], found[1]);
  assign_tensors(value, found);
  EXPECT_EQ(std::get<0>(value).numel(), 2);
  EXPECT_EQ(std::get<2>(value)[0].numel(), 1);
  EXPECT_EQ(std::get<1>(value), 3);
}

TEST(Visit, EmptyOptionalIsAnUndefinedTensor) {
  std::tuple<std::optional<at::Tensor>, at::Tensor> value{std::nullopt, at::ones({2})};
  auto found = tensors_of(value);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_FALSE(found[0].defined());
  assign_tensors(value, found);
  EXPECT_FALSE(std::get<0>(value).has_value());
  assign_tensors(value, {at::ones({1}), found[1]});
  EXPECT_TRUE(std::get<0>(value).has_value());
}

TEST(Visit, CanVisitIsFalseForOpaqueStructs) {
  static_assert(can_visit<at::Tensor> && can_visit<const at::Tensor&> && can_visit<std::vector<at::Tensor>>);
  static_assert(can_visit<int> && can_visit<bool&> && can_visit<std::string> && can_visit<std::vector<int64_t>>);
  static_assert(can_visit<std::optional<std::tuple<at::Tensor, double>>> && can_visit<Batch> && can_visit<Opaque*>);
  static_assert(!can_visit<Opaque> && !can_visit<std::vector<Opaque>> && !can_visit<std::tuple<at::Tensor, Opaque>>);
}

}  // namespace
}  // namespace tessera
