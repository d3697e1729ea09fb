#include "tests/rules/family_test.h"

#include "tessera/rules/detail/view_map.h"

#include <ATen/ops/complex.h>

namespace tessera::testing {
namespace {

c10::IValue ints(std::vector<int64_t> v) { return c10::IValue(std::move(v)); }

Placements follow(std::vector<int64_t> from, std::vector<int64_t> to, std::vector<int64_t> mesh, Placements in) {
  Placements out;
  for (const auto& p : rules::ViewMap(from, to).follow(in, mesh))
    out.push_back(p.value_or(MaskPartial()));  // none: P(mask)
  return out;
}

const Placement kNone = MaskPartial();

TEST(ViewRules, HoldByBruteForce) {
  auto x = numbers({5, 3}), y = numbers({2, 4, 3}), t = numbers({3, 5}).t(), ones = numbers({1, 4, 1, 3});
  auto complex = at::complex(x, x.mul(0.5));
  expect_family_holds("view", {
                                  {"aten::detach", {x}, {}},
                                  {"aten::alias", {t}, {}},
                                  {"aten::lift_fresh", {x}, {}},
                                  {"aten::_neg_view", {x}, {}},
                                  {"aten::detach_", {x.clone()}, {}},
                                  {"aten::t", {x}, {}},
                                  {"aten::t_", {x.clone()}, {}},
                                  {"aten::transpose.int", {y, 0, -1}, {}},
                                  {"aten::transpose_", {y.clone(), 0, 1}, {}},
                                  {"aten::permute", {y, ints({2, 0, 1})}, {}},
                                  {"aten::view", {y, ints({8, 3})}, {}},
                                  {"aten::view", {y, ints({-1})}, {}},
                                  {"aten::view", {numbers({0, 4}), ints({4, 0, 2})}, {}},
                                  {"aten::view", {numbers({1}), ints({})}, {}},
                                  {"aten::view", {x, ints({3, 5})}, {}},
                                  {"aten::view", {numbers({24}), ints({2, 4, 3})}, {}},
                                  {"aten::view", {numbers({6, 4}), ints({2, 3, 2, 2})}, {}},
                                  {"aten::view", {numbers({4, 6}), ints({2, 12})}, {}},
                                  {"aten::view", {numbers({12, 8}), ints({16, 6})}, {}},
                                  {"aten::view", {ones, ints({4, 3, 1})}, {}},
                                  {"aten::view", {numbers({3, 4, 2}).transpose(1, 2), ints({1, 3, 2, 4})}, {}},
                                  {"aten::resize_", {y.clone(), ints({8, 3})}, {}},
                                  {"aten::resize_", {t.clone(), ints({5, 3})}, {}},
                                  {"aten::_unsafe_view", {numbers({4, 9}), ints({2, 2, 3, 3})}, {}},
                                  {"aten::_reshape_alias", {y, ints({2, 12}), ints({12, 1})}, {}},
                                  {"aten::view.dtype", {x, static_cast<int64_t>(at::kLong)}, {}},
                                  {"aten::view.dtype", {x, static_cast<int64_t>(at::kInt)}, {}},
                                  {"aten::expand", {numbers({5, 1}), ints({2, -1, 3})}, {}},
                                  {"aten::expand", {numbers({3}), ints({1, 5, 3})}, {}},
                                  {"aten::squeeze", {ones}, {}},
                                  {"aten::squeeze.dim", {ones, 2}, {}},
                                  {"aten::squeeze.dim", {ones, 1}, {}},
                                  {"aten::squeeze.dims", {ones, ints({0, 1})}, {}},
                                  {"aten::squeeze_", {ones.clone()}, {}},
                                  {"aten::squeeze_.dim", {ones.clone(), 0}, {}},
                                  {"aten::squeeze_.dims", {ones.clone(), ints({0, 2})}, {}},
                                  {"aten::unsqueeze", {y, 1}, {}},
                                  {"aten::unsqueeze", {t, -1}, {}},
                                  {"aten::unsqueeze_", {y.clone(), 0}, {}},
                                  {"aten::slice.Tensor", {y, 1, 1, 4, 2}, {}},
                                  {"aten::slice.Tensor", {y, 1}, {}},
                                  {"aten::slice.Tensor", {y, 1, -2, std::numeric_limits<int64_t>::max(), 1}, {}},
                                  {"aten::select.int", {y, 1, -1}, {}},
                                  {"aten::split.Tensor", {x, 2, 0}, {}},
                                  {"aten::split.Tensor", {x, 8, 0}, {}},
                                  {"aten::unsafe_split.Tensor", {x, 2, 1}, {}},
                                  {"aten::split_with_sizes", {x, ints({1, 4}), 0}, {}},
                                  {"aten::unsafe_split_with_sizes", {x, ints({1, 2}), 1}, {}},
                                  {"aten::unbind.int", {y, 2}, {}},
                                  {"aten::diagonal", {y, 1, 1, 2}, {}},
                                  {"aten::unfold", {x, 0, 3, 2}, {}},
                                  {"aten::unfold", {numbers({}), 0, 1, 1}, {}},
                                  {"aten::as_strided", {x, ints({3, 2}), ints({2, 3}), 1}, {}},
                                  {"aten::_conj", {complex}, {}},
                                  {"aten::view_as_real", {complex}, {}},
                                  {"aten::view_as_real", {complex.t()}, {}},
                                  {"aten::view_as_complex", {numbers({5, 3, 2})}, {}},
                                  {"aten::detach_copy", {x}, {}},
                                  {"aten::alias_copy", {t}, {}},
                                  {"aten::_neg_view_copy", {x}, {}},
                                  {"aten::_conj_copy", {complex}, {}},
                                  {"aten::view_copy", {y, ints({8, 3})}, {}},
                                  {"aten::view_copy.dtype", {x, static_cast<int64_t>(at::kInt)}, {}},
                                  {"aten::expand_copy", {numbers({5, 1}), ints({2, -1, 3})}, {}},
                                  {"aten::t_copy", {x}, {}},
                                  {"aten::transpose_copy.int", {y, 0, -1}, {}},
                                  {"aten::permute_copy", {y, ints({2, 0, 1})}, {}},
                                  {"aten::unsqueeze_copy", {y, 1}, {}},
                                  {"aten::slice_copy.Tensor", {y, 1, 1, 4, 2}, {}},
                                  {"aten::narrow_copy", {y, 1, 1, 2}, {}},
                                  {"aten::select_copy.int", {y, 1, -1}, {}},
                                  {"aten::split_copy.Tensor", {x, 2, 0}, {}},
                                  {"aten::split_with_sizes_copy", {x, ints({1, 4}), 0}, {}},
                                  {"aten::unbind_copy.int", {y, 2}, {}},
                                  {"aten::diagonal_copy", {y, 1, 1, 2}, {}},
                                  {"aten::unfold_copy", {x, 0, 3, 2}, {}},
                                  {"aten::view_as_real_copy", {complex}, {}},
                                  {"aten::view_as_complex_copy", {numbers({5, 3, 2})}, {}},
                              });
}

TEST(ViewRules, KeptShardings) {
  // (batch, sequence, features) to (batch * sequence, features)
  EXPECT_EQ(follow({4, 6, 5}, {24, 5}, {2}, {Shard(0)}), Placements{Shard(0)});
  EXPECT_EQ(follow({4, 6, 5}, {24, 5}, {3}, {Shard(0)}), Placements{Shard(0, 6)});
  EXPECT_EQ(follow({4, 6, 5}, {24, 5}, {2}, {Shard(1)}), Placements{StridedShard(0, 4)});
  EXPECT_EQ(follow({4, 6, 5}, {24, 5}, {2}, {Shard(2)}), Placements{Shard(1)});
  // and back
  EXPECT_EQ(follow({24, 5}, {4, 6, 5}, {3}, {Shard(0, 6)}), Placements{Shard(0)});
  EXPECT_EQ(follow({24, 5}, {4, 6, 5}, {2}, {StridedShard(0, 4)}), Placements{Shard(1)});
  // heads: features (heads * width) to (heads, width)
  EXPECT_EQ(follow({5, 12}, {5, 4, 3}, {2}, {Shard(1)}), Placements{Shard(1)});
  EXPECT_EQ(follow({5, 12}, {5, 4, 3}, {3}, {Shard(1, 3)}), Placements{Shard(1)});
  EXPECT_EQ(follow({5, 12}, {5, 4, 3}, {3}, {Shard(1)}), Placements{kNone});  // it would split a head over two ranks
  // sequence and batch on two axes
  EXPECT_EQ(follow({4, 6, 5}, {24, 5}, {2, 2}, (Placements{Shard(0), Shard(1)})),
            (Placements{Shard(0), StridedShard(0, 2)}));
  // a bias gradient: dims of size 1 do not count
  EXPECT_EQ(follow({1, 7}, {7}, {3}, {Shard(1)}), Placements{Shard(0)});
  // R and partials do not change
  EXPECT_EQ(follow({4, 6}, {24}, {2, 2}, (Placements{Replicate(), Partial()})), (Placements{Replicate(), Partial()}));
}

// pytorch#179502: [12, 8] S(1) viewed as [16, 6] has no placement; S(0) would be silently wrong.
TEST(ViewRules, ViewWithoutAPlacementIsRejected) {
  EXPECT_EQ(follow({12, 8}, {16, 6}, {4}, {Shard(1)}), Placements{kNone});
}

}  // namespace
}  // namespace tessera::testing
