#include "tessera/base/error.h"
#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"

// Backward of views that select a part of a tensor: the gradient is copied into zeros of the input's sizes. It is
// linear. Dims along which the view selects a part must not be sharded. The sizes argument becomes the local sizes.
namespace tessera::rules {
namespace {

// `out_dim[d]`: the dim of the result for dim d of the gradient, or -1 if it must not be sharded.
Rule put_into_zeros(const OpQuery& query, const std::vector<int64_t>& out_dim) {
  const auto out_ndim = static_cast<int64_t>(query.ints_at(1).size());
  for (auto d : out_dim)
    TESSERA_CHECK(d < out_ndim, UsageError, query.schema.operator_name(), ": a gradient of sizes ",
                  query.tensor(0).sizes, " does not belong to a tensor of sizes ", query.ints_at(1));
  Rule rule;
  rule.outs = {contiguous_out(query.ints_at(1))};
  rule.fixes = {{.arg = 1, .what = ArgFix::What::OutSizes}};
  add_replicated_strategy(rule, query);
  for (size_t d = 0; d < out_dim.size(); d++)
    if (out_dim[d] >= 0) rule.add_strategy({S(static_cast<int64_t>(d))}, {S(out_dim[d])});
  for (auto p : kZeroKeeping) add_uniform_strategy(rule, query, p);
  return rule;
}

void check_gradient_dims(const OpQuery& query, size_t ndim) {
  TESSERA_CHECK(ndim > 0 && query.tensor(0).sizes.size() == ndim, UsageError, query.schema.operator_name(),
                ": a gradient of sizes ", query.tensor(0).sizes, " does not belong to a tensor of sizes ",
                query.ints_at(1));
}

// slice_backward(grad, input_sizes, dim, start, end, step)
Rule slice_backward(const OpQuery& query) {
  auto sizes = query.ints_at(1);
  auto dim = query.dim_at(2, static_cast<int64_t>(sizes.size()));
  auto dims = all_dims(query.tensor(0));
  check_gradient_dims(query, sizes.size());
  bool all_of_it = sizes[dim] == query.tensor(0).sizes[dim];
  if (!all_of_it) dims[dim] = -1;
  return put_into_zeros(query, dims);
}

// select_backward(grad, input_sizes, dim, index)
Rule select_backward(const OpQuery& query) {
  auto dim = query.dim_at(2, static_cast<int64_t>(query.ints_at(1).size()));
  auto dims = all_dims(query.tensor(0));
  for (auto& d : dims) d += d >= dim;
  return put_into_zeros(query, dims);
}

// diagonal_backward(grad, input_sizes, offset, dim1, dim2). The last dim of the gradient is the diagonal.
Rule diagonal_backward(const OpQuery& query) {
  auto ndim = static_cast<int64_t>(query.ints_at(1).size());
  int64_t low = std::min(query.dim_at(3, ndim), query.dim_at(4, ndim));
  int64_t high = std::max(query.dim_at(3, ndim), query.dim_at(4, ndim));
  check_gradient_dims(query, query.ints_at(1).size() - 1);
  auto dims = all_dims(query.tensor(0));
  for (auto& d : dims) {
    d += d >= low;
    d += d >= high;
  }
  dims.back() = -1;
  return put_into_zeros(query, dims);
}

// unfold_backward(grad, input_sizes, dim, size, step). The last dim of the gradient is the position in a window.
Rule unfold_backward(const OpQuery& query) {
  check_gradient_dims(query, query.ints_at(1).size() + 1);
  auto dims = all_dims(query.tensor(0));
  dims[query.dim_at(2, static_cast<int64_t>(query.ints_at(1).size()))] = -1;
  dims.back() = -1;
  Rule rule = put_into_zeros(query, dims);
  // Windows overlap, so elements of two ranks can be added to one element. A P(mask) gradient then gives P(sum).
  for (auto& strategy : rule.strategies)
    if (strategy.in[0] == Pmask) strategy.out[0] = Psum;
  return rule;
}

// value_selecting_reduction_backward(grad, dim, indices, sizes, keepdim): backward of max.dim, median and others. The
// gradient is written at the position of the index. Linear in grad, which has the placements of indices. The op is
// composite in ATen, but that code makes plain zeros.
Rule value_selecting(const OpQuery& query) {
  auto sizes = query.ints_at(3);
  auto ndim = static_cast<int64_t>(sizes.size());
  auto dim = query.dim_at(1, ndim);
  bool kept = query.bool_at(4);
  Rule rule;
  rule.outs = {contiguous_out(sizes)};
  rule.fixes = {{.arg = 3, .what = ArgFix::What::OutSizes}};
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < ndim; d++)
    if (d != dim) {
      auto shard = S(kept || d < dim ? d : d - 1);
      StrategyBuilder(rule, query).in(0, shard).in(2, shard).out(0, S(d));
    }
  for (auto p : kZeroKeeping) StrategyBuilder(rule, query).in(0, p).out(0, p);
  return rule;
}

}  // namespace

void register_view_backward(Registry& to) {
  Family family(to, "view_backward");
  family.op("slice_backward", slice_backward);
  family.op("select_backward", select_backward);
  family.op("diagonal_backward", diagonal_backward);
  family.op("unfold_backward", unfold_backward);
  family.op("value_selecting_reduction_backward", value_selecting);
}

}  // namespace tessera::rules
