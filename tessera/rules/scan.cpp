#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

// Ops along one dim that keep the dim: softmax, cumsum, sort, topk. That dim must not be sharded; other dims can be.
namespace tessera::rules {
namespace {

// All tensors of the call have the sizes of the first one. `dim_arg` is the argument with the dim that must not be
// sharded.
Rule along(const OpQuery& query, int dim_arg, Sizes out_sizes, c10::ArrayRef<Placement> through = {}) {
  const auto& self = query.tensors[0];
  auto ndim = static_cast<int64_t>(self.sizes.size());
  int64_t scan_dim = query.dim_at(dim_arg, ndim);
  Rule rule;
  rule.outs.assign(static_cast<size_t>(fresh_outputs(query.schema)), contiguous_out(out_sizes));
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim; d++)
    if (d != scan_dim) add_uniform_strategy(rule, query, S(d));
  for (auto p : through) add_uniform_strategy(rule, query, p);
  return rule;
}

Rule along_same_sizes(const OpQuery& query, int dim_arg) {
  return along(query, dim_arg, Sizes(query.tensors[0].sizes));
}

// The result has the strides of an elementwise op (sort).
Rule same_geometry(const OpQuery& query, int dim_arg) {
  Rule rule = along_same_sizes(query, dim_arg);
  for (auto& out : rule.outs) out.strides = pointwise_strides(out.sizes, query.tensors);
  return rule;
}

Rule cumsum(const OpQuery& query) {
  return along(query, 1, Sizes(query.tensors[0].sizes), kLinearPartials);  // linear
}

// renorm(self, p, dim, maxnorm) scales each slice along `dim` by its norm, which needs all other dims.
Rule renorm(const OpQuery& query) {
  const auto& self = query.tensors[0];
  int64_t dim = query.dim_at(2, static_cast<int64_t>(self.sizes.size()));
  Rule rule;
  if (fresh_outputs(query.schema) > 0) rule.outs = {contiguous_out(self.sizes)};
  add_replicated_strategy(rule, query);
  add_uniform_strategy(rule, query, S(dim));
  return rule;
}

// linalg_cross(self, other, dim): the two tensors broadcast.
Rule cross(const OpQuery& query) {
  Rule rule;
  const auto sizes = broadcast_sizes(query);
  const auto ndim = static_cast<int64_t>(sizes.size());
  const int64_t dim = query.dim_at(2, ndim);
  rule.outs = query.dense_outs.value_or(std::vector<OutInfo>{contiguous_out(sizes)});
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim; d++)
    if (d != dim)
      StrategyBuilder(rule, query)
          .in(0, broadcast_shard(query.tensor(0), sizes, d))
          .in(1, broadcast_shard(query.tensor(1), sizes, d))
          .out(0, S(d));
  return rule;
}

Rule topk(const OpQuery& query) {
  Sizes sizes(query.tensors[0].sizes);
  if (!sizes.empty()) sizes[query.dim_at(2, static_cast<int64_t>(sizes.size()))] = query.int_at(1);
  return along(query, 2, sizes);
}

// glu(self, dim) halves the dim. Its backward takes the gradient (halved) and self.
Rule glu(const OpQuery& query) {
  Sizes sizes(query.tensors[0].sizes);
  sizes[query.dim_at(1, static_cast<int64_t>(sizes.size()))] /= 2;
  Rule rule = along(query, 1, sizes);
  const auto& self = query.tensors[0];
  TensorArg half{sizes, self.strides, self.dtype, self.arg, self.element, true};
  rule.outs[0].strides = pointwise_strides(sizes, half);  // an elementwise op of the two halves
  return rule;
}

Rule glu_backward(const OpQuery& query) {
  Rule rule = along_same_sizes(query, 2);
  rule.outs[0] = contiguous_out(query.tensor(1).sizes);
  return rule;
}

}  // namespace

void register_scan(Registry& to) {
  Family family(to, "scan");
  for (const auto* op : {"_softmax", "_log_softmax"})
    family.op(op, [](const OpQuery& q) { return along_same_sizes(q, 1); });
  for (const auto* op : {"_softmax_backward_data", "_log_softmax_backward_data"})
    family.op(op, [](const OpQuery& q) { return along_same_sizes(q, 2); });
  family.op_and_in_place("cumsum", cumsum);
  family.op_and_in_place("cumprod", [](const OpQuery& q) { return along_same_sizes(q, 1); });
  for (const auto* op : {"logcumsumexp", "_logcumsumexp", "cummax", "cummin"})
    family.op(op, [](const OpQuery& q) { return along_same_sizes(q, 1); });
  family.op_and_in_place("renorm", renorm);
  family.op("linalg_cross", cross);
  family.op("sort", [](const OpQuery& q) { return same_geometry(q, 1); });
  family.op("sort.stable", [](const OpQuery& q) { return same_geometry(q, 2); });
  family.op("topk", topk);
  family.op("glu", glu);
  family.op("glu_backward", glu_backward);
}

}  // namespace tessera::rules
