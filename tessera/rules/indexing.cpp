#include "tessera/base/error.h"
#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

#include <algorithm>

// Ops that read or write at positions given by an index tensor. A dim that is indexed must not be sharded. Other dims
// can be sharded in all tensors. The index tensor can be sharded if each index gives one result. Reads are linear in
// the tensor that is read.
namespace tessera::rules {
namespace {

int64_t ndim_of(const TensorArg& tensor) { return static_cast<int64_t>(tensor.sizes.size()); }

// index_select(self, dim, index)
Rule index_select(const OpQuery& query) {
  const auto &self = query.tensor(0), &index = query.tensor(2);
  int64_t dim = query.dim_at(1, ndim_of(self));
  Sizes sizes(self.sizes);
  if (!sizes.empty()) sizes[dim] = numel_of(index.sizes);
  Rule rule;
  rule.outs = {contiguous_out(sizes)};
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim_of(self); d++)
    if (d != dim) StrategyBuilder(rule, query).in(0, S(d)).out(0, S(d));
  if (ndim_of(index) == 1 && ndim_of(self) > 0) StrategyBuilder(rule, query).in(2, S(0)).out(0, S(dim));
  for (auto p : kLinearPartials) StrategyBuilder(rule, query).in(0, p).out(0, p);
  return rule;
}

// gather(self, dim, index): out[i][j] = self[i][index[i][j]]
Rule gather(const OpQuery& query) {
  const auto &self = query.tensor(0), &index = query.tensor(2);
  int64_t dim = query.dim_at(1, ndim_of(self));
  Rule rule;
  rule.outs = {contiguous_out(index.sizes)};
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim_of(index) && ndim_of(self) == ndim_of(index); d++) {
    if (d == dim)
      StrategyBuilder(rule, query).in(2, S(d)).out(0, S(d));
    else if (self.sizes[d] == index.sizes[d])
      StrategyBuilder(rule, query).in(0, S(d)).in(2, S(d)).out(0, S(d));
  }
  for (auto p : kLinearPartials) StrategyBuilder(rule, query).in(0, p).out(0, p);
  return rule;
}

// take(self, index): self is read as one dim, so it is not sharded.
Rule take(const OpQuery& query) {
  const auto& index = query.tensor(1);
  Rule rule;
  rule.outs = {contiguous_out(index.sizes)};
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim_of(index); d++) StrategyBuilder(rule, query).in(1, S(d)).out(0, S(d));
  for (auto p : kLinearPartials) StrategyBuilder(rule, query).in(0, p).out(0, p);
  return rule;
}

// The output has the sizes of self. In-place forms have no output. Ops that begin with a clone keep the strides.
void out_of_self_sizes(Rule& rule, const OpQuery& query, bool keeps_strides) {
  const auto& self = query.tensor(0);
  if (fresh_outputs(query.schema) == 0) return;
  rule.outs = {{Sizes(self.sizes), keeps_strides ? like_strides(self.sizes, self.strides, std::nullopt) : Sizes{}}};
}

void out_if_any(Rule& rule, StrategyBuilder& strategy, Placement p) {
  if (!rule.outs.empty()) strategy.out(0, p);
}

// scatter(self, dim, index, src or value): self[index[i][j]][j] = src[i][j]
Rule scatter(const OpQuery& query, bool adds) {
  const auto &self = query.tensor(0), &index = query.tensor(2);
  const auto* src = query.find_tensor(3);
  int64_t dim = query.dim_at(1, ndim_of(self));
  Rule rule;
  out_of_self_sizes(rule, query, false);
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim_of(self) && ndim_of(index) == ndim_of(self); d++) {
    bool alike = self.sizes[d] == index.sizes[d] && (!src || src->sizes[d] == index.sizes[d]);
    if (d == dim || !alike) continue;
    StrategyBuilder strategy(rule, query);
    strategy.in(0, S(d)).in(2, S(d)).in(3, S(d));
    out_if_any(rule, strategy, S(d));
  }
  if (!adds) return rule;
  for (auto p : kLinearPartials) {
    StrategyBuilder strategy(rule, query);
    strategy.in(0, p).in(3, p);
    out_if_any(rule, strategy, p);
  }
  // Each rank adds its own entries.
  if (ndim_of(index) > 0 && index.sizes[dim] == src->sizes[dim]) {
    StrategyBuilder strategy(rule, query);
    strategy.in(0, Psum).in(2, S(dim)).in(3, S(dim));
    out_if_any(rule, strategy, Psum);
  }
  return rule;
}

// index_add(self, dim, index, source), index_copy, index_fill(self, dim, index, value)
Rule along_index(const OpQuery& query, bool adds, bool clones) {
  const auto& self = query.tensor(0);
  const auto* source = query.find_tensor(3);
  int64_t dim = query.dim_at(1, ndim_of(self));
  bool source_is_like_self = source && ndim_of(*source) == ndim_of(self) && ndim_of(self) > 0;
  Rule rule;
  out_of_self_sizes(rule, query, clones);
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim_of(self); d++) {
    if (d == dim) continue;
    StrategyBuilder strategy(rule, query);
    strategy.in(0, S(d));
    if (source_is_like_self) strategy.in(3, S(d));
    out_if_any(rule, strategy, S(d));
  }
  if (!adds || !source_is_like_self) return rule;
  for (auto p : kLinearPartials) {
    StrategyBuilder strategy(rule, query);
    strategy.in(0, p).in(3, p);
    out_if_any(rule, strategy, p);
  }
  StrategyBuilder strategy(rule, query);
  strategy.in(0, Psum).in(2, S(0)).in(3, S(dim));
  out_if_any(rule, strategy, Psum);
  return rule;
}

// self[i0, :, i1, ...]: which dims are indexed, and which dims of the result are index dims or other dims of self.
//   self (2, 3, 4, 5), indices (-, a, b, -) with a and b of sizes (6)    result (2, 6, 5): index dims begin at 1
//   self (2, 3, 4),    indices (a, -, b)                                 result (6, 3): not adjacent, they begin at 0
struct Indexing {
  std::vector<bool> indexed;     // for each dim of self
  Sizes index_sizes;             // the indices, broadcast together
  int64_t begin = 0;             // of the index dims in the result
  Sizes sizes;                   // of the result
  std::vector<int64_t> out_dim;  // for each dim of self that is not indexed, else -1

  Indexing(const OpQuery& query, int list_arg) {
    const auto& self = query.tensor(0);
    indexed.assign(self.sizes.size(), false);
    int64_t last = -1, first = -1;
    bool adjacent = true;
    OpQuery only_indices{query.schema, query.args, {}, query.in_backward};
    for (const auto& tensor : query.tensors) {
      if (tensor.arg != list_arg) continue;
      TESSERA_CHECK(tensor.element < ndim_of(self), UsageError, query.schema.operator_name(),
                    ": too many indices for sizes ", self.sizes);
      if (first < 0) first = tensor.element;
      adjacent &= last < 0 || tensor.element == last + 1;
      last = tensor.element;
      indexed[static_cast<size_t>(tensor.element)] = true;
      only_indices.tensors.push_back(tensor);
    }
    index_sizes = broadcast_sizes(only_indices);
    begin = adjacent && first >= 0 ? first : 0;
    out_dim.assign(self.sizes.size(), -1);
    auto take_others = [&](int64_t from, int64_t to) {
      for (int64_t d = from; d < to; d++) {
        if (indexed[d]) continue;
        out_dim[d] = static_cast<int64_t>(sizes.size());
        sizes.push_back(self.sizes[d]);
      }
    };
    take_others(0, begin);
    sizes.append(index_sizes.begin(), index_sizes.end());
    take_others(begin, ndim_of(self));
  }
};

bool has_mask(const OpQuery& query, int list_arg) {
  return std::any_of(query.tensors.begin(), query.tensors.end(), [&](const TensorArg& t) {
    return t.arg == list_arg && (t.dtype == c10::kBool || t.dtype == c10::kByte);
  });
}

// ATen computes the strides of the result with TensorIterator. The operands are self, with stride 0 along the index
// dims, and the indices.
Sizes index_strides(const OpQuery& query, const Indexing& how) {
  const auto& self = query.tensor(0);
  auto index_ndim = how.index_sizes.size();
  std::vector<Sizes> storage;
  storage.reserve(2 * query.tensors.size());
  std::vector<TensorArg> operands;
  auto operand = [&](Sizes sizes, Sizes strides) {
    storage.push_back(std::move(sizes));
    storage.push_back(std::move(strides));
    operands.push_back({storage[storage.size() - 2], storage.back(), c10::kFloat, 0, -1, true});
  };
  Sizes self_strides(how.sizes.size(), 0);
  for (size_t d = 0; d < how.out_dim.size(); d++)
    if (how.out_dim[d] >= 0) self_strides[how.out_dim[d]] = self.strides[d];
  operand(how.sizes, self_strides);
  for (const auto& tensor : query.tensors) {
    if (tensor.arg != 1) continue;
    Sizes sizes(how.sizes.size(), 1), strides(how.sizes.size(), 0);
    for (int64_t d = 0; d < ndim_of(tensor); d++) {
      auto at = how.begin + static_cast<int64_t>(index_ndim) - ndim_of(tensor) + d;
      sizes[at] = tensor.sizes[d];
      strides[at] = tensor.strides[d];
    }
    operand(sizes, strides);
  }
  return pointwise_strides(how.sizes, operands);
}

// index(self, indices)
Rule index(const OpQuery& query) {
  if (has_mask(query, 1)) {  // the size of the result depends on the data
    Rule rule;
    rule.gathered = true;
    return rule;
  }
  Indexing how(query, 1);
  Rule rule;
  rule.outs = {{how.sizes, index_strides(query, how)}};
  add_replicated_strategy(rule, query);
  for (size_t d = 0; d < how.out_dim.size(); d++)
    if (how.out_dim[d] >= 0) StrategyBuilder(rule, query).in(0, S(static_cast<int64_t>(d))).out(0, S(how.out_dim[d]));
  for (int64_t i = 0; i < static_cast<int64_t>(how.index_sizes.size()); i++) {
    Placements in;
    for (const auto& tensor : query.tensors)
      in.push_back(tensor.arg == 1 ? broadcast_shard(tensor, how.index_sizes, i) : R);
    rule.add_strategy(std::move(in), {S(how.begin + i)});
  }
  for (auto p : kLinearPartials) StrategyBuilder(rule, query).in(0, p).out(0, p);
  return rule;
}

// index_put(self, indices, values, accumulate). values are broadcast to the sizes of index(self, indices).
Rule index_put(const OpQuery& query) {
  const auto& values = query.tensor(2);
  bool adds = query.bool_at(3);
  Rule rule;
  out_of_self_sizes(rule, query, true);
  add_replicated_strategy(rule, query);
  if (has_mask(query, 1)) return rule;  // the position of each element depends on the data
  Indexing how(query, 1);
  for (size_t d = 0; d < how.out_dim.size(); d++) {
    if (how.out_dim[d] < 0) continue;
    auto shard = S(static_cast<int64_t>(d));
    StrategyBuilder strategy(rule, query);
    strategy.in(0, shard).in(2, broadcast_shard(values, how.sizes, how.out_dim[d]));
    out_if_any(rule, strategy, shard);
  }
  if (!adds) return rule;
  for (auto p : kLinearPartials) {
    StrategyBuilder strategy(rule, query);
    strategy.in(0, p).in(2, p);
    out_if_any(rule, strategy, p);
  }
  for (int64_t i = 0; i < static_cast<int64_t>(how.index_sizes.size()); i++) {  // each rank adds its own entries
    Placements in;
    for (const auto& tensor : query.tensors)
      in.push_back(tensor.arg == 0   ? Psum
                   : tensor.arg == 1 ? broadcast_shard(tensor, how.index_sizes, i)
                                     : broadcast_shard(tensor, how.sizes, how.begin + i));
    rule.add_strategy(std::move(in), Placements(rule.outs.size(), Psum));
  }
  return rule;
}

// scatter_reduce(self, dim, index, src, reduce, include_self), index_reduce: like scatter, and a reduction other than a
// sum is not linear.
Rule scatter_reduce(const OpQuery& query) { return scatter(query, false); }

// searchsorted(sorted_sequence, self): the sequence has one dim, or the leading dims of self.
Rule searchsorted(const OpQuery& query) {
  const auto &sequence = query.tensor(0), &self = query.tensor(1);
  Rule rule;
  rule.outs = {contiguous_out(self.sizes)};
  add_replicated_strategy(rule, query);
  const bool one_sequence = ndim_of(sequence) == 1;
  for (int64_t d = 0; d < ndim_of(self); d++) {
    StrategyBuilder strategy(rule, query);
    strategy.in(1, S(d)).out(0, S(d));
    if (!one_sequence && d + 1 < ndim_of(self)) strategy.in(0, S(d)).in(5, S(d));
  }
  // A position is the number of smaller values: a sum over the shards. `sorter` has positions in the full sequence.
  if (!query.find_tensor(5)) StrategyBuilder(rule, query).in(0, S(ndim_of(sequence) - 1)).out(0, Psum);
  return rule;
}

// bucketize(self, boundaries). A bucket is the number of smaller boundaries: a sum over the shards.
Rule bucketize(const OpQuery& query) {
  Rule rule;
  rule.outs = {contiguous_out(query.tensor(0).sizes)};
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim_of(query.tensor(0)); d++) StrategyBuilder(rule, query).in(0, S(d)).out(0, S(d));
  StrategyBuilder(rule, query).in(1, S(0)).out(0, Psum);
  return rule;
}

// isin(elements, test_elements)
Rule isin(const OpQuery& query) {
  const auto& elements = query.tensor(0);
  Rule rule;
  rule.outs = query.dense_outs.value_or(std::vector<OutInfo>{contiguous_out(elements.sizes)});
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim_of(elements); d++) StrategyBuilder(rule, query).in(0, S(d)).out(0, S(d));
  return rule;
}

}  // namespace

void register_indexing(Registry& to) {
  Family family(to, "indexing");
  family.op("index_select", index_select);
  family.op("gather", gather);
  family.op("take", take);
  for (const auto* op : {"scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce"})
    family.op_and_in_place(op, [](const OpQuery& q) { return scatter(q, false); });
  family.op_and_in_place("scatter_add", [](const OpQuery& q) { return scatter(q, true); });
  family.op_and_in_place("index_add", [](const OpQuery& q) { return along_index(q, true, false); });
  family.op_and_in_place("index_copy", [](const OpQuery& q) { return along_index(q, false, false); });
  for (const auto* op : {"index_fill.int_Scalar", "index_fill.int_Tensor"})
    family.op_and_in_place(op, [](const OpQuery& q) { return along_index(q, false, true); });
  family.op_and_in_place("scatter_reduce.two", scatter_reduce);
  family.op_and_in_place("index_reduce", [](const OpQuery& q) { return along_index(q, false, false); });
  family.op("searchsorted.Tensor", searchsorted);
  family.op("bucketize.Tensor", bucketize);
  for (const auto* op : {"isin.Tensor_Tensor", "isin.Tensor_Scalar"}) family.op(op, isin);
  family.op("index.Tensor", index);
  family.op_and_in_place("index_put", index_put);
  family.op_and_in_place("_index_put_impl", index_put);
}

}  // namespace tessera::rules
