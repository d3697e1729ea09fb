#include "tessera/base/error.h"
#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"
#include "tessera/rules/detail/view_map.h"

#include <algorithm>
#include <numeric>

// Views. The placements of the input determine the placements of the output. R and partials do not change.
namespace tessera::rules {
namespace {

// A view: its sizes, its strides, and the output dim of each input dim.
struct View {
  Sizes sizes, strides;
  DimMap map;

  explicit View(const TensorArg& self) : sizes(self.sizes), strides(self.strides) {
    map.out_dim.resize(sizes.size());
    std::iota(map.out_dim.begin(), map.out_dim.end(), 0);
  }
  void drop(int64_t d) {
    TESSERA_CHECK(d < static_cast<int64_t>(sizes.size()), UsageError, "a view without dim ", d,
                  " of a tensor of sizes ", c10::IntArrayRef(sizes));
    sizes.erase(sizes.begin() + d);
    strides.erase(strides.begin() + d);
    for (auto& o : map.out_dim) o = o == d ? -1 : o > d ? o - 1 : o;
  }
  void must_not_be_sharded(int64_t d) {
    for (auto& o : map.out_dim)
      if (o == d) o = -1;
  }
};

// In-place forms (t_, squeeze_) return the argument itself, so they have no new output.
Rule follows(const OpQuery& query, View view) {
  Rule rule;
  rule.outs = {{view.sizes, view.strides}};
  rule.follow = [map = std::move(view.map)](PlacementsRef in, c10::IntArrayRef shape) { return map.follow(in, shape); };
  (void)query;
  return rule;
}

Rule identity(const OpQuery& query) { return follows(query, View(query.tensor(0))); }

Rule permuted(const OpQuery& query, c10::ArrayRef<int64_t> order) {
  const auto& self = query.tensor(0);
  View view(self);
  for (size_t o = 0; o < order.size(); o++) {
    view.sizes[o] = self.sizes[order[o]];
    view.strides[o] = self.strides[order[o]];
    view.map.out_dim[order[o]] = static_cast<int64_t>(o);
  }
  return follows(query, std::move(view));
}

Rule transposed(const OpQuery& query, int64_t a, int64_t b) {
  auto order = all_dims(query.tensor(0));
  if (!order.empty()) std::swap(order[a], order[b]);
  return permuted(query, order);
}

Rule t(const OpQuery& query) {
  auto ndim = query.tensor(0).sizes.size();
  TESSERA_CHECK(ndim <= 2, UsageError, "aten::t of a tensor with ", ndim, " dims; write transpose(dim0, dim1)");
  return transposed(query, 0, ndim < 2 ? 0 : 1);
}

Rule transpose(const OpQuery& query) {
  auto ndim = static_cast<int64_t>(query.tensor(0).sizes.size());
  return transposed(query, query.dim_at(1, ndim), query.dim_at(2, ndim));
}

Rule permute(const OpQuery& query) {
  auto order = query.ints_at(1);
  auto ndim = static_cast<int64_t>(query.tensor(0).sizes.size());
  for (auto& d : order) d = d < 0 ? d + ndim : d;
  auto sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (int64_t d = 0; d < static_cast<int64_t>(sorted.size()); d++)
    TESSERA_CHECK(static_cast<int64_t>(sorted.size()) == ndim && sorted[d] == d, UsageError,
                  "aten::permute: ", query.ints_at(1), " is not a permutation of the dims of ", query.tensor(0).sizes);
  return permuted(query, order);
}

// The sizes in the argument, with -1 replaced.
Sizes asked_sizes(const OpQuery& query, int arg, int64_t numel) {
  auto asked = query.ints_at(arg);
  int64_t known = 1, unknown = -1;
  for (size_t d = 0; d < asked.size(); d++) {
    if (asked[d] == -1)
      unknown = static_cast<int64_t>(d);
    else
      known *= asked[d];
  }
  if (unknown >= 0 && known > 0) {
    asked[unknown] = numel / known;
    known *= asked[unknown];
  }
  TESSERA_CHECK(known == numel, UsageError, query.schema.operator_name(), ": sizes ", query.ints_at(arg),
                " do not have the ", numel, " elements of ", query.tensor(0).sizes);
  return Sizes(asked.begin(), asked.end());
}

Rule view(const OpQuery& query) {
  const auto& self = query.tensor(0);
  auto sizes = asked_sizes(query, 1, numel_of(self.sizes));
  auto strides = view_strides(self.sizes, self.strides, sizes);
  TESSERA_CHECK(strides, UsageError, query.schema.operator_name(), ": a tensor of sizes ", self.sizes, " and strides ",
                self.strides, " cannot be viewed as ", c10::IntArrayRef(sizes), " without a copy; write reshape");
  Rule rule;
  rule.outs = {{sizes, *strides}};
  rule.follow = [map = ViewMap(self.sizes, sizes)](PlacementsRef in, c10::IntArrayRef shape) {
    return map.follow(in, shape);
  };
  rule.fixes = {{.arg = 1, .what = ArgFix::What::OutSizes}};
  return rule;
}

// resize_(self, size, memory_format) to as many elements: the elements keep their order in memory.
Rule resize(const OpQuery& query) {
  const auto& self = query.tensor(0);
  const auto asked = query.ints_at(1);
  const bool is_same = self.sizes == c10::IntArrayRef(asked);
  TESSERA_CHECK(numel_of(self.sizes) == numel_of(asked), UsageError, "aten::resize_ of a distributed tensor of sizes ",
                self.sizes, " to ", c10::IntArrayRef(asked),
                ": it keeps the number of elements. Make a new tensor instead.");
  TESSERA_CHECK(is_same || is_contiguous(self.sizes, self.strides), UsageError,
                "aten::resize_ of a distributed tensor of sizes ", self.sizes, " and strides ", self.strides, " to ",
                c10::IntArrayRef(asked), ": its elements are not in memory order. Write contiguous() first.");
  Rule rule = is_same ? identity(query) : view(query);
  rule.fixes = {{.arg = 1, .what = ArgFix::What::OutSizes}};
  rule.special = "tessera::resize";
  return rule;
}

// _reshape_alias(self, size, stride)
Rule reshape_alias(const OpQuery& query) {
  Rule rule = view(query);
  rule.fixes.push_back({.arg = 2, .what = ArgFix::What::OutStrides});
  return rule;
}

// view.dtype reads the bits as another type. If the element size changes, the last dim must not be sharded.
Rule view_dtype(const OpQuery& query) {
  const auto& self = query.tensor(0);
  auto from = static_cast<int64_t>(c10::elementSize(self.dtype));
  auto to = static_cast<int64_t>(c10::elementSize(static_cast<c10::ScalarType>(query.int_at(1))));
  View view(self);
  view.map.keeps_partial = false;  // a sum of the bits is not the bits of a sum
  if (from != to) {
    auto last = static_cast<int64_t>(self.sizes.size()) - 1;
    TESSERA_CHECK(last >= 0, UsageError, "aten::view.dtype: a tensor without dims cannot change its element size");
    view.must_not_be_sharded(last);
    view.sizes[last] = view.sizes[last] * from / to;
    for (int64_t d = 0; d < last; d++) view.strides[d] = view.strides[d] * from / to;
  }
  return follows(query, std::move(view));
}

Rule expand(const OpQuery& query) {
  const auto& self = query.tensor(0);
  auto asked = query.ints_at(1);
  auto lead = static_cast<int64_t>(asked.size()) - static_cast<int64_t>(self.sizes.size());
  TESSERA_CHECK(lead >= 0, UsageError, "aten::expand: ", self.sizes, " to fewer dims: ", asked);
  View view(self);
  view.sizes.assign(asked.begin(), asked.end());
  view.strides.assign(asked.size(), 0);
  for (int64_t o = static_cast<int64_t>(asked.size()) - 1; o >= 0; o--) {
    int64_t own = o - lead;
    if (own < 0) {  // a new dim; if its size is 1, it has the stride of a contiguous tensor
      bool innermost = o + 1 == static_cast<int64_t>(asked.size());
      view.strides[o] = asked[o] != 1 ? 0 : innermost ? 1 : view.sizes[o + 1] * view.strides[o + 1];
      continue;
    }
    if (asked[o] == -1) view.sizes[o] = self.sizes[own];
    bool spread = self.sizes[own] == 1 && view.sizes[o] != 1;
    TESSERA_CHECK(spread || view.sizes[o] == self.sizes[own], UsageError, "aten::expand: ", self.sizes, " to ", asked,
                  ": only dims of size 1 can grow");
    view.strides[o] = spread ? 0 : self.strides[own];
    view.map.out_dim[own] = spread ? -1 : o;
  }
  Rule rule = follows(query, std::move(view));
  rule.fixes = {{.arg = 1, .what = ArgFix::What::OutSizes}};
  return rule;
}

// Removes only dims of global size 1. A local dim of a sharded tensor can have size 1 too, so the local op takes a list
// of dims.
Rule squeezed(const OpQuery& query, std::vector<int64_t> dims, const std::string& special) {
  const auto& self = query.tensor(0);
  auto ndim = static_cast<int64_t>(self.sizes.size());
  for (auto& d : dims) d = d < 0 ? d + std::max<int64_t>(ndim, 1) : d;
  std::sort(dims.begin(), dims.end());
  dims.erase(std::unique(dims.begin(), dims.end()), dims.end());
  std::erase_if(dims, [&](int64_t d) { return d >= ndim || self.sizes[d] != 1; });
  View view(self);
  for (size_t i = dims.size(); i-- > 0;) view.drop(dims[i]);
  Rule rule = follows(query, std::move(view));
  rule.special = special;
  rule.special_args = {c10::IValue(dims)};
  return rule;
}

Rule unsqueeze(const OpQuery& query) {
  const auto& self = query.tensor(0);
  int64_t at = query.dim_at(1, static_cast<int64_t>(self.sizes.size()) + 1);
  View view(self);
  int64_t stride = at < static_cast<int64_t>(self.sizes.size()) ? self.sizes[at] * self.strides[at] : 1;
  view.sizes.insert(view.sizes.begin() + at, 1);
  view.strides.insert(view.strides.begin() + at, stride);
  for (auto& o : view.map.out_dim) o += o >= at;
  return follows(query, std::move(view));
}

Rule slice(const OpQuery& query) {
  const auto& self = query.tensor(0);
  auto dim = query.dim_at(1, static_cast<int64_t>(self.sizes.size()));
  int64_t size = self.sizes[dim];
  auto within = [&](int arg, int64_t otherwise) {
    int64_t at = query.is_none(arg) ? otherwise : query.int_at(arg);
    return std::clamp<int64_t>(at < 0 ? at + size : at, 0, size);
  };
  int64_t begin = within(2, 0), end = std::max(begin, within(3, size)), step = query.int_at(4);
  TESSERA_CHECK(step > 0, UsageError, "aten::slice: step ", step, "; it must be positive");
  View view(self);
  view.sizes[dim] = (end - begin + step - 1) / step;
  view.strides[dim] *= step;
  bool all_of_it = begin == 0 && end == size && step == 1;
  if (!all_of_it) view.must_not_be_sharded(dim);
  return follows(query, std::move(view));
}

// narrow_copy(self, dim, start, length)
Rule narrow(const OpQuery& query) {
  const auto& self = query.tensor(0);
  const auto dim = query.dim_at(1, static_cast<int64_t>(self.sizes.size()));
  View view(self);
  TESSERA_CHECK(query.int_at(3) >= 0, UsageError, query.schema.operator_name(), ": length ", query.int_at(3),
                "; it must not be negative");
  view.sizes[dim] = query.int_at(3);
  view.must_not_be_sharded(dim);
  return follows(query, std::move(view));
}

Rule select(const OpQuery& query) {
  const auto& self = query.tensor(0);
  auto ndim = static_cast<int64_t>(self.sizes.size());
  auto dim = query.dim_at(1, ndim), index = query.int_at(2);
  TESSERA_CHECK(ndim > 0 && -self.sizes[dim] <= index && index < self.sizes[dim], UsageError, "aten::select: index ",
                index, " of dim ", dim, " of ", self.sizes);
  View view(self);
  view.drop(dim);
  return follows(query, std::move(view));
}

// Several outputs that differ only in the size of one dim, which must not be sharded.
Rule split_into(const OpQuery& query, int64_t dim, const std::vector<int64_t>& lengths) {
  const auto& self = query.tensor(0);
  int64_t covered = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  TESSERA_CHECK(covered == self.sizes[dim], UsageError, query.schema.operator_name(), ": parts ", lengths, " of dim ",
                dim, " of ", self.sizes, " must add up to ", self.sizes[dim]);
  View view(self);
  if (lengths.size() > 1) view.must_not_be_sharded(dim);
  Rule rule = follows(query, view);
  rule.outs.clear();
  for (auto length : lengths) {
    view.sizes[dim] = length;
    rule.outs.push_back({view.sizes, view.strides});
  }
  return rule;
}

Rule split(const OpQuery& query) {
  const auto& self = query.tensor(0);
  auto dim = query.dim_at(2, static_cast<int64_t>(self.sizes.size()));
  int64_t each = query.int_at(1), left = self.sizes[dim];
  TESSERA_CHECK(each > 0 || left == 0, UsageError, "aten::split: parts of ", each,
                " elements; write a positive split size");
  std::vector<int64_t> lengths;
  do {
    lengths.push_back(std::min(each, left));
    left -= lengths.back();
  } while (left > 0);
  return split_into(query, dim, lengths);
}

Rule split_with_sizes(const OpQuery& query) {
  return split_into(query, query.dim_at(2, static_cast<int64_t>(query.tensor(0).sizes.size())), query.ints_at(1));
}

Rule unbind(const OpQuery& query) {
  const auto& self = query.tensor(0);
  auto dim = query.dim_at(1, static_cast<int64_t>(self.sizes.size()));
  View view(self);
  view.drop(dim);
  Rule rule = follows(query, view);
  rule.outs.assign(static_cast<size_t>(self.sizes[dim]), {view.sizes, view.strides});
  return rule;
}

Rule diagonal(const OpQuery& query) {
  const auto& self = query.tensor(0);
  auto ndim = static_cast<int64_t>(self.sizes.size());
  int64_t offset = query.int_at(1), a = query.dim_at(2, ndim), b = query.dim_at(3, ndim);
  TESSERA_CHECK(a != b, UsageError, "aten::diagonal: dim1 and dim2 are both ", a, "; write two different dims of ",
                self.sizes);
  int64_t rows = self.sizes[a] + std::min<int64_t>(offset, 0), columns = self.sizes[b] - std::max<int64_t>(offset, 0);
  View view(self);
  int64_t stride = self.strides[a] + self.strides[b];
  view.drop(std::max(a, b));
  view.drop(std::min(a, b));
  view.sizes.push_back(std::max<int64_t>(0, std::min(rows, columns)));
  view.strides.push_back(stride);
  return follows(query, std::move(view));
}

Rule unfold(const OpQuery& query) {
  const auto& self = query.tensor(0);
  auto ndim = static_cast<int64_t>(self.sizes.size());
  int64_t dim = query.dim_at(1, ndim), size = query.int_at(2), step = query.int_at(3);
  if (ndim == 0) {  // a window of the one element, or none
    View view(self);
    view.sizes = {size};
    view.strides = {1};
    return follows(query, std::move(view));
  }
  TESSERA_CHECK(step > 0 && size <= self.sizes[dim], UsageError, "aten::unfold: windows of ", size, " every ", step,
                " of dim ", dim, " of ", self.sizes);
  View view(self);
  view.must_not_be_sharded(dim);
  view.sizes[dim] = (self.sizes[dim] - size) / step + 1;
  view.strides[dim] *= step;
  view.sizes.push_back(size);
  view.strides.push_back(self.strides[dim]);
  return follows(query, std::move(view));
}

// view_as_real(self): the last dim of the result has the real and the imaginary part.
Rule view_as_real(const OpQuery& query) {
  View view(query.tensor(0));
  for (auto& stride : view.strides) stride *= 2;
  view.sizes.push_back(2);
  view.strides.push_back(1);
  Rule rule = follows(query, std::move(view));
  rule.special = "tessera::view_as_real_local";
  return rule;
}

Rule view_as_complex(const OpQuery& query) {
  View view(query.tensor(0));
  const auto last = static_cast<int64_t>(view.sizes.size()) - 1;
  TESSERA_CHECK(last >= 0 && view.sizes[last] == 2, UsageError, "aten::view_as_complex: the last dim of ",
                query.tensor(0).sizes, " must have size 2");
  view.drop(last);
  for (auto& stride : view.strides) stride /= 2;
  return follows(query, std::move(view));
}

// The op that copies a view: view_copy, slice_copy, ... Its result is contiguous.
RuleFn copied(Rule (*view)(const OpQuery&)) {
  return [view](const OpQuery& query) {
    Rule rule = view(query);
    for (auto& out : rule.outs) out.strides.clear();
    return rule;
  };
}

// as_strided reads the memory of the global tensor, which local shards do not have. So the input must be R or partial.
Rule as_strided(const OpQuery& query) {
  View view(query.tensor(0));
  auto sizes = query.ints_at(1), strides = query.ints_at(2);
  view.sizes.assign(sizes.begin(), sizes.end());
  view.strides.assign(strides.begin(), strides.end());
  std::fill(view.map.out_dim.begin(), view.map.out_dim.end(), -1);
  return follows(query, std::move(view));
}

}  // namespace

void register_view(Registry& to) {
  Family family(to, "view");
  for (const auto* op : {"detach", "alias", "lift_fresh", "_neg_view", "_conj"}) family.op(op, identity);
  family.op("view_as_real", view_as_real);
  family.op("view_as_complex", view_as_complex);
  family.op("detach_", identity);
  family.op_and_in_place("t", t);
  for (const auto* op : {"transpose.int", "transpose_"}) family.op(op, transpose);
  family.op("permute", permute);
  for (const auto* op : {"view", "_unsafe_view"}) family.op(op, view);
  family.op("_reshape_alias", reshape_alias);
  family.op("resize_", resize);
  family.op("view.dtype", view_dtype);
  family.op("expand", expand);
  family.op_and_in_place("squeeze",
                         [](const OpQuery& q) { return squeezed(q, all_dims(q.tensor(0)), "tessera::squeeze"); });
  family.op_and_in_place("squeeze.dim",
                         [](const OpQuery& q) { return squeezed(q, {q.int_at(1)}, "tessera::squeeze.dim"); });
  family.op_and_in_place("squeeze.dims",
                         [](const OpQuery& q) { return squeezed(q, q.ints_at(1), "tessera::squeeze.dims"); });
  family.op_and_in_place("unsqueeze", unsqueeze);
  family.op("slice.Tensor", slice);
  family.op("select.int", select);
  for (const auto* op : {"split.Tensor", "unsafe_split.Tensor"}) family.op(op, split);
  for (const auto* op : {"split_with_sizes", "unsafe_split_with_sizes"}) family.op(op, split_with_sizes);
  family.op("unbind.int", unbind);
  family.op("diagonal", diagonal);
  family.op("unfold", unfold);
  family.op("as_strided", as_strided);
  for (const auto* op : {"detach_copy", "alias_copy", "_neg_view_copy", "_conj_copy"}) family.op(op, copied(identity));
  family.op("view_copy", copied(view));
  family.op("view_copy.dtype", copied(view_dtype));
  family.op("expand_copy", copied(expand));
  family.op("t_copy", copied(t));
  family.op("transpose_copy.int", copied(transpose));
  family.op("permute_copy", copied(permute));
  family.op("unsqueeze_copy", copied(unsqueeze));
  family.op("slice_copy.Tensor", copied(slice));
  family.op("narrow_copy", copied(narrow));
  family.op("select_copy.int", copied(select));
  family.op("split_copy.Tensor", copied(split));
  family.op("split_with_sizes_copy", copied(split_with_sizes));
  family.op("unbind_copy.int", copied(unbind));
  family.op("diagonal_copy", copied(diagonal));
  family.op("unfold_copy", copied(unfold));
  family.op("view_as_real_copy", copied(view_as_real));
  family.op("view_as_complex_copy", copied(view_as_complex));
}

}  // namespace tessera::rules
