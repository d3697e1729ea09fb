#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"

// Embedding lookup and its backward.
namespace tessera::rules {
namespace {

// embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
Rule embedding(const OpQuery& query) {
  const auto &weight = query.tensor(0), &indices = query.tensor(1);
  Sizes sizes(indices.sizes);
  sizes.push_back(weight.sizes[1]);
  auto last = static_cast<int64_t>(sizes.size()) - 1;
  Rule rule;
  rule.outs = {contiguous_out(sizes)};
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < last; d++) StrategyBuilder(rule, query).in(1, S(d)).out(0, S(d));
  StrategyBuilder(rule, query).in(0, S(1)).out(0, S(last));
  // A rank looks up the indices of its own shard of the weight, and gives zeros for the others.
  StrategyBuilder(rule, query).in(0, S(0)).out(0, Pmask).special(/*one_range=*/true);
  rule.special = "tessera::masked_embedding";
  rule.special_args = {weight.sizes[0]};
  rule.special_fixes = {{.arg = -1, .what = ArgFix::What::InOffset, .tensor = query.index_of(0), .dim = 0}};
  return rule;
}

// embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq) adds each row of grad to the
// row of the weight that it came from. Every rank computes a gradient of the full weight's sizes. If the weight is
// S(0), the gradient is then reduce-scattered or sliced.
Rule embedding_backward(const OpQuery& query) {
  const auto &grad = query.tensor(0), &indices = query.tensor(1);
  auto last = static_cast<int64_t>(grad.sizes.size()) - 1;
  Rule rule;
  rule.outs = {contiguous_out({query.int_at(2), grad.sizes[last]})};
  add_replicated_strategy(rule, query);
  StrategyBuilder(rule, query).in(0, S(last)).out(0, S(1));
  bool by_frequency = query.bool_at(4);  // this needs the number of occurrences of each index on all ranks
  for (int64_t d = 0; d < static_cast<int64_t>(indices.sizes.size()) && !by_frequency; d++)
    StrategyBuilder(rule, query).in(0, S(d)).in(1, S(d)).out(0, Psum);
  for (auto p : kLinearPartials) StrategyBuilder(rule, query).in(0, p).out(0, p);
  StrategyBuilder(rule, query).in(0, Pmask).out(0, Psum);
  return rule;
}

}  // namespace

void register_embedding(Registry& to) {
  Family family(to, "embedding");
  family.op("embedding", embedding);
  family.op("embedding_dense_backward", embedding_backward);
}

}  // namespace tessera::rules
