#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

#include <c10/core/WrapDimMinimal.h>

#include <cmath>
#include <limits>

// Reductions along some dims. A dim that is not reduced can be sharded, and the result is sharded there too. If a
// reduced dim is sharded, the result is partial. The table below has the partial of each op.
namespace tessera::rules {
namespace {

// Which dims of a tensor are reduced, and which dims of the result the others are.
struct Reduced {
  Sizes out_sizes;
  std::vector<bool> dims;
  std::vector<int64_t> out_dim;  // of a dim that is not reduced
  int64_t count = 1;             // number of elements that are reduced to one
};

// dim_arg = -1, or a None or empty argument: all dims. keep_arg = -1: keepdim is false.
Reduced reduced_dims(const OpQuery& query, int tensor_arg, int dim_arg, int keep_arg) {
  auto sizes = query.tensor(tensor_arg).sizes;
  auto ndim = static_cast<int64_t>(sizes.size());
  std::vector<int64_t> asked = dim_arg < 0 ? std::vector<int64_t>{} : query.ints_at(dim_arg);
  bool keep = keep_arg >= 0 && query.bool_at(keep_arg);
  Reduced result;
  result.dims.assign(sizes.size(), asked.empty());
  for (auto dim : asked) {
    const auto reduced = c10::maybe_wrap_dim(dim, ndim);
    if (ndim > 0) result.dims[static_cast<size_t>(reduced)] = true;
  }
  for (int64_t d = 0; d < ndim; d++) {
    result.out_dim.push_back(static_cast<int64_t>(result.out_sizes.size()));
    if (!result.dims[d]) {
      result.out_sizes.push_back(sizes[d]);
    } else {
      result.count *= sizes[d];
      if (keep) result.out_sizes.push_back(1);
    }
  }
  return result;
}

// `partial`: the result if a reduced dim is sharded; R: it must not be sharded. `through`: partials that the op keeps.
// Every output has the same sizes.
Rule reduction(const OpQuery& query, const Reduced& reduced, Placement partial, c10::ArrayRef<Placement> through) {
  Rule rule;
  rule.outs.assign(static_cast<size_t>(fresh_outputs(query.schema)), contiguous_out(reduced.out_sizes));
  rule.flops = static_cast<double>(numel_of(query.tensors[0].sizes));
  add_replicated_strategy(rule, query);
  for (size_t d = 0; d < reduced.dims.size(); d++) {
    if (reduced.dims[d] && partial.is_replicate()) continue;
    const auto out = reduced.dims[d] ? partial : S(reduced.out_dim[d]);
    rule.add_strategy({S(static_cast<int64_t>(d))}, Placements(rule.outs.size(), out));
  }
  for (auto p : through) add_uniform_strategy(rule, query, p);
  return rule;
}

// Strategies that shard a reduced dim run another op.
void special_where_sharded(Rule& rule, const Reduced& reduced, const std::string& op,
                           std::vector<c10::IValue> args = {}) {
  rule.special = op;
  rule.special_args = std::move(args);
  for (auto& strategy : rule.strategies)
    if (strategy.in[0].is_sharded() && reduced.dims[strategy.in[0].dim]) strategy.special = true;
}

Rule sum(const OpQuery& query, const Reduced& reduced) {
  Rule rule = reduction(query, reduced, Psum, kLinearPartials);
  rule.add_strategy({Pmask}, {Psum});
  return rule;
}

// A mean of local means is wrong for uneven shards. So a sharded dim is summed and divided by the global count.
Rule mean(const OpQuery& query, const Reduced& reduced, const std::string& special) {
  Rule rule = sum(query, reduced);
  special_where_sharded(rule, reduced, special, {static_cast<double>(reduced.count)});
  return rule;
}

// A rank without elements has the lowest (highest) number of the dtype; the plain op throws.
Rule extreme(const OpQuery& query, const Reduced& reduced, Placement partial, const std::string& special) {
  Rule rule = reduction(query, reduced, partial, {partial});
  special_where_sharded(rule, reduced, special);
  return rule;
}

// aminmax: both results.
Rule both_extremes(const OpQuery& query, const Reduced& reduced) {
  if (query.tensors[0].dtype == c10::kBool) return reduction(query, reduced, R, {});
  Rule rule = reduction(query, reduced, Pmin, {});
  for (auto& strategy : rule.strategies)
    if (strategy.out[1] == Pmin) strategy.out[1] = Pmax;
  special_where_sharded(rule, reduced, "tessera::aminmax_or_extremes");
  return rule;
}

// The p-norm is the p-norm of the ranks' norms. p = 0 counts nonzeros, so the counts are summed. Negative p needs a
// replicated input, because a rank without elements would need the value infinity.
Rule reduction_norm(const OpQuery& query, const Reduced& reduced, double p, const std::string& special) {
  auto partial = p == 0 ? Psum : p > 0 ? NormPartial(p) : R;
  Rule rule = reduction(query, reduced, partial, {});
  if (std::isinf(p) && p > 0) special_where_sharded(rule, reduced, special);
  return rule;
}

double norm_order(const OpQuery& query, int arg) { return query.is_none(arg) ? 2.0 : query.double_at(arg); }

// For each op: its dim and keepdim arguments, its rule, and whether the rule reads a scalar argument.
const struct ReductionOp {
  const char* op;
  int dim, keep;
  Rule (*fn)(const OpQuery&, const Reduced&);
  bool reads_scalars;
} kReductions[] = {
    {"sum", -1, -1, sum, false},
    {"sum.dim_IntList", 1, 2, sum, false},
    {"mean", -1, -1, [](auto& q, auto& r) { return mean(q, r, "tessera::mean_of"); }, false},
    {"mean.dim", 1, 2, [](auto& q, auto& r) { return mean(q, r, "tessera::mean_of.dim"); }, false},
    {"prod", -1, -1, [](auto& q, auto& r) { return reduction(q, r, Pproduct, {Pproduct}); }, false},
    {"prod.dim_int", 1, 2, [](auto& q, auto& r) { return reduction(q, r, Pproduct, {Pproduct}); }, false},
    {"nansum", 1, 2, [](auto& q, auto& r) { return reduction(q, r, Psum, {}); }, false},
    {"count_nonzero.dim_IntList", 1, -1, [](auto& q, auto& r) { return reduction(q, r, Psum, {}); }, false},
    {"linalg__powsum", 2, 3, [](auto& q, auto& r) { return reduction(q, r, Psum, {}); }, false},
    {"amax", 1, 2, [](auto& q, auto& r) { return extreme(q, r, Pmax, "tessera::amax_or_lowest"); }, false},
    {"amin", 1, 2, [](auto& q, auto& r) { return extreme(q, r, Pmin, "tessera::amin_or_highest"); }, false},
    {"aminmax", 1, 2, both_extremes, false},
    {"max", -1, -1, [](auto& q, auto& r) { return extreme(q, r, Pmax, "tessera::max_or_lowest"); }, false},
    {"min", -1, -1, [](auto& q, auto& r) { return extreme(q, r, Pmin, "tessera::min_or_highest"); }, false},
    {"norm.Scalar", -1, -1,
     [](auto& q, auto& r) { return reduction_norm(q, r, norm_order(q, 1), "tessera::norm_or_zero"); }, true},
    {"norm.ScalarOpt_dim", 2, 3,
     [](auto& q, auto& r) { return reduction_norm(q, r, norm_order(q, 1), "tessera::norm_or_zero.dim"); }, true},
    {"norm.ScalarOpt_dim_dtype", 2, 3,
     [](auto& q, auto& r) { return reduction_norm(q, r, norm_order(q, 1), "tessera::norm_or_zero.dim_dtype"); }, true},
    {"norm.ScalarOpt_dtype", -1, -1,
     [](auto& q, auto& r) { return reduction_norm(q, r, norm_order(q, 1), "tessera::norm_or_zero.dtype"); }, true},
    {"linalg_vector_norm", 2, 3,
     [](auto& q, auto& r) { return reduction_norm(q, r, norm_order(q, 1), "tessera::vector_norm_or_zero"); }, true},
    // For these ops a reduced dim must not be sharded. The ranks' results cannot be combined by one reduction (var,
    // logsumexp), contain indices (max.dim, argmax), or are bool, which not every backend reduces (all, any).
    {"var.correction", 1, 3, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"std.correction", 1, 3, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"var_mean.correction", 1, 3, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"std_mean.correction", 1, 3, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"_aminmax", -1, -1, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"_aminmax.dim", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"nanmedian", -1, -1, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"nanmedian.dim", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"mode", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"kthvalue", 2, 3, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"logsumexp", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"max.dim", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"min.dim", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"argmax", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"argmin", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"median", -1, -1, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"median.dim", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"all", -1, -1, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"all.dim", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"all.dims", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"any", -1, -1, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"any.dim", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
    {"any.dims", 1, 2, [](auto& q, auto& r) { return reduction(q, r, R, {}); }, false},
};

// trace(self): a sum of the diagonal, linear. A rank cannot know which elements of its shard are on the diagonal.
Rule trace(const OpQuery& query) {
  Rule rule;
  rule.outs = {contiguous_out({})};
  add_replicated_strategy(rule, query);
  for (auto p : kLinearPartials) add_uniform_strategy(rule, query, p);
  return rule;
}

}  // namespace

void register_reduction(Registry& to) {
  Family family(to, "reduction");
  for (const auto& row : kReductions)
    family.op(
        row.op, [&row](const OpQuery& query) { return row.fn(query, reduced_dims(query, 0, row.dim, row.keep)); },
        ListMode::Joint, row.reads_scalars);
  family.op("trace", trace);
}

}  // namespace tessera::rules
