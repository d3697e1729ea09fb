#include "tessera/base/error.h"
#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

#include <c10/core/WrapDimMinimal.h>

#include <algorithm>

// Ops that move elements or replace them by a constant: flip, roll, repeat, pad, tril, slice_scatter. Dims along which
// elements move must not be sharded.
namespace tessera::rules {
namespace {

// The rule of an op with one tensor in and out. `moves[d]`: dim d must not be sharded.
Rule rearranged(const OpQuery& query, OutInfo out, const std::vector<bool>& moves, c10::ArrayRef<Placement> through) {
  Rule rule;
  if (fresh_outputs(query.schema) > 0) rule.outs = {std::move(out)};
  add_replicated_strategy(rule, query);
  for (size_t d = 0; d < moves.size(); d++)
    if (!moves[d]) add_uniform_strategy(rule, query, S(static_cast<int64_t>(d)));
  for (auto p : through) add_uniform_strategy(rule, query, p);
  return rule;
}

std::vector<bool> marked(size_t ndim, const std::vector<int64_t>& dims) {
  std::vector<bool> result(ndim, false);
  for (auto d : dims) result.at(static_cast<size_t>(c10::maybe_wrap_dim(d, static_cast<int64_t>(ndim)))) = true;
  return result;
}

// flip(self, dims)
Rule flip(const OpQuery& query) {
  const auto& self = query.tensor(0);
  OutInfo out{Sizes(self.sizes), like_strides(self.sizes, self.strides, std::nullopt)};
  return rearranged(query, out, marked(self.sizes.size(), query.ints_at(1)), kAnyPartial);
}

// roll(self, shifts, dims). Without dims it rolls the flattened tensor.
Rule roll(const OpQuery& query) {
  const auto& self = query.tensor(0);
  auto dims = query.ints_at(2);
  auto moves = dims.empty() ? std::vector<bool>(self.sizes.size(), true) : marked(self.sizes.size(), dims);
  return rearranged(query, contiguous_out(self.sizes), moves, kAnyPartial);
}

// tril(self, diagonal), triu: write zeros along the last two dims.
Rule triangle(const OpQuery& query) {
  const auto& self = query.tensor(0);
  std::vector<bool> moves(self.sizes.size(), false);
  for (size_t i = 0; i < std::min<size_t>(2, moves.size()); i++) moves[moves.size() - 1 - i] = true;
  return rearranged(query, contiguous_out(self.sizes), moves, kZeroKeeping);
}

// repeat(self, repeats). New dims come first.
Rule repeat(const OpQuery& query) {
  const auto& self = query.tensor(0);
  auto repeats = query.ints_at(1);
  TESSERA_CHECK(repeats.size() >= self.sizes.size(), UsageError, "aten::repeat of sizes ", self.sizes, ": repeats ",
                repeats, " has fewer dims");
  auto lead = repeats.size() - self.sizes.size();
  Sizes sizes(repeats.begin(), repeats.end());
  for (size_t d = 0; d < self.sizes.size(); d++) sizes[lead + d] *= self.sizes[d];
  Rule rule;
  rule.outs = {contiguous_out(sizes)};
  add_replicated_strategy(rule, query);
  for (size_t d = 0; d < self.sizes.size(); d++)
    if (repeats[lead + d] == 1) rule.add_strategy({S(static_cast<int64_t>(d))}, {S(static_cast<int64_t>(lead + d))});
  for (auto p : kAnyPartial) add_uniform_strategy(rule, query, p);
  return rule;
}

// constant_pad_nd(self, pad, value). `pad` has (before, after) of the last dim, then of the dim before it, and so on.
// P(sum) is kept if the value is zero; otherwise every rank would add it.
Rule pad(const OpQuery& query) {
  const auto& self = query.tensor(0);
  auto pads = query.ints_at(1);
  auto ndim = self.sizes.size();
  Sizes sizes(self.sizes);
  std::vector<bool> moves(ndim, false);
  for (size_t i = 0; 2 * i + 1 < pads.size(); i++) {
    sizes[ndim - 1 - i] += pads[2 * i] + pads[2 * i + 1];
    moves[ndim - 1 - i] = pads[2 * i] != 0 || pads[2 * i + 1] != 0;
  }
  bool last = is_channels_last(self.sizes, self.strides) && !is_contiguous(self.sizes, self.strides);
  Rule rule = rearranged(query, {sizes, last ? channels_last(sizes) : Sizes{}}, moves, {Pavg, Pmax, Pmin});
  const auto value = query.args[2].toScalar();
  if (value.equal(0))
    for (auto p : {Psum, Pmask}) add_uniform_strategy(rule, query, p);
  return rule;
}

// slice_scatter(self, src, dim, ...), select_scatter(self, src, dim, index): a copy of self with src written into it.
// self and src have the same placements and are not sharded along dim. The src of select_scatter does not have that
// dim.
Rule scattered_part(const OpQuery& query, bool src_lacks_dim) {
  const auto& self = query.tensor(0);
  auto ndim = static_cast<int64_t>(self.sizes.size());
  int64_t dim = query.dim_at(2, ndim);
  Rule rule;
  rule.outs = {{Sizes(self.sizes), like_strides(self.sizes, self.strides, std::nullopt)}};
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim; d++)
    if (d != dim) rule.add_strategy({S(d), S(src_lacks_dim && d > dim ? d - 1 : d)}, {S(d)});
  for (auto p : kAnyPartial) add_uniform_strategy(rule, query, p);
  return rule;
}

// diag_embed(self, offset, dim1, dim2): the last dim of self becomes a diagonal of two new dims.
Rule diag_embed(const OpQuery& query) {
  const auto& self = query.tensor(0);
  const auto ndim = static_cast<int64_t>(self.sizes.size()) + 1;  // of the result
  const int64_t low = std::min(query.dim_at(2, ndim), query.dim_at(3, ndim));
  const int64_t high = std::max(query.dim_at(2, ndim), query.dim_at(3, ndim));
  TESSERA_CHECK(low != high && ndim >= 2, UsageError, "aten::diag_embed of sizes ", self.sizes,
                ": dim1 and dim2 must differ");
  const int64_t side = self.sizes[self.sizes.size() - 1] + std::abs(query.int_at(1));
  Sizes sizes;
  std::vector<int64_t> out_dim;  // of each dim of self but the last
  for (int64_t d = 0; d < ndim; d++) {
    const bool on_diagonal = d == low || d == high;
    sizes.push_back(on_diagonal ? side : self.sizes[out_dim.size()]);
    if (!on_diagonal) out_dim.push_back(d);
  }
  Rule rule;
  rule.outs = {contiguous_out(sizes)};
  add_replicated_strategy(rule, query);
  for (size_t d = 0; d < out_dim.size(); d++) rule.add_strategy({S(static_cast<int64_t>(d))}, {S(out_dim[d])});
  for (auto p : kZeroKeeping) add_uniform_strategy(rule, query, p);
  return rule;
}

// diagonal_scatter(self, src, offset, dim1, dim2): a copy of self with src on a diagonal. The diagonal is the last dim
// of src.
Rule diagonal_scatter(const OpQuery& query) {
  const auto& self = query.tensor(0);
  const auto ndim = static_cast<int64_t>(self.sizes.size());
  const int64_t low = std::min(query.dim_at(3, ndim), query.dim_at(4, ndim));
  const int64_t high = std::max(query.dim_at(3, ndim), query.dim_at(4, ndim));
  Rule rule;
  rule.outs = {{Sizes(self.sizes), like_strides(self.sizes, self.strides, std::nullopt)}};
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim; d++)
    if (d != low && d != high) rule.add_strategy({S(d), S(d - (d > low) - (d > high))}, {S(d)});
  for (auto p : kAnyPartial) add_uniform_strategy(rule, query, p);
  return rule;
}

}  // namespace

void register_arranging(Registry& to) {
  Family family(to, "arranging");
  family.op("flip", flip);
  family.op("roll", roll);
  for (const auto* op : {"tril", "triu"}) family.op_and_in_place(op, triangle);
  family.op("repeat", repeat);
  family.op("constant_pad_nd", pad, ListMode::Joint, /*reads_scalars=*/true);
  family.op("slice_scatter", [](const OpQuery& q) { return scattered_part(q, false); });
  family.op("diag_embed", diag_embed);
  family.op("diagonal_scatter", diagonal_scatter);
  family.op("select_scatter", [](const OpQuery& q) { return scattered_part(q, true); });
}

}  // namespace tessera::rules
