#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/elementwise.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

// Losses. A mean is the global sum divided by the global count. A mean of local means is wrong for uneven shards.
namespace tessera::rules {
namespace {

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };  // at::Reduction

// Elementwise losses: (self, target, ..., reduction, ...) with broadcasting. The special op has the count as its last
// argument.
Rule elementwise_loss(const OpQuery& query, int reduction_arg, const std::string& special) {
  int64_t reduction = query.int_at(reduction_arg);
  Rule rule = elementwise(query);
  if (reduction == kNone) return rule;
  auto count = static_cast<double>(numel_of(rule.outs[0].sizes));
  rule.outs = {contiguous_out({})};
  rule.flops = count;
  for (auto& strategy : rule.strategies) {
    if (!strategy.out[0].is_sharded()) continue;
    strategy.out[0] = Psum;
    strategy.special = reduction == kMean;
  }
  if (reduction == kMean) {
    rule.special = special;
    rule.special_args = {count};
  }
  return rule;
}

// (grad_output, self, target, ..., reduction, ...). grad_output has one element unless reduction = none. The plain op
// divides by the local number of elements, so the special op takes the global count.
Rule elementwise_loss_backward(const OpQuery& query, int reduction_arg, const std::string& special) {
  Rule rule = elementwise(query);
  if (query.int_at(reduction_arg) != kMean) return rule;
  rule.special = special;
  rule.special_args = {static_cast<double>(numel_of(rule.outs[0].sizes))};
  for (auto& strategy : rule.strategies) strategy.special = strategy.out[0].is_sharded();
  return rule;
}

// Scores are (N, C, ...) or (C); targets are (N, ...). The class dim must not be sharded.
int64_t class_dim(c10::IntArrayRef scores) { return scores.size() == 1 ? 0 : 1; }

// nll_loss_forward(self, target, weight, reduction, ignore_index) -> output, total_weight
// The denominator of the mean is the total weight of the targets that are not ignored, so it depends on the data. The
// mean is computed by an op that sums losses and denominators over all ranks and then divides.
Rule nll_loss(const OpQuery& query, const std::string& mean) {
  const auto &self = query.tensor(0), &target = query.tensor(1);
  int64_t reduction = query.int_at(3);
  Rule rule;
  if (reduction == kMean) {
    rule.decompose = mean;
    return rule;
  }
  rule.outs = {contiguous_out(reduction == kNone ? c10::IntArrayRef(target.sizes) : c10::IntArrayRef{}),
               contiguous_out({})};
  rule.flops = static_cast<double>(numel_of(target.sizes));
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < static_cast<int64_t>(self.sizes.size()); d++) {
    if (d == class_dim(self.sizes)) continue;
    auto target_shard = S(d == 0 ? 0 : d - 1);
    StrategyBuilder(rule, query)
        .in(0, S(d))
        .in(1, target_shard)
        .out(0, reduction == kNone ? target_shard : Psum)
        .out(1, Psum);
  }
  return rule;
}

// nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight) divides by total_weight,
// which is global.
Rule nll_loss_backward(const OpQuery& query) {
  const auto& self = query.tensor(1);
  bool each = query.int_at(4) == kNone && !query.tensor(0).sizes.empty();
  Rule rule;
  rule.outs = {contiguous_out(self.sizes)};
  add_replicated_strategy(rule, query);
  for (int64_t d = 0; d < static_cast<int64_t>(self.sizes.size()); d++) {
    if (d == class_dim(self.sizes)) continue;
    auto target_shard = S(d == 0 ? 0 : d - 1);
    StrategyBuilder(rule, query).in(0, each ? target_shard : R).in(1, S(d)).in(2, target_shard).out(0, S(d));
  }
  return rule;
}

const struct ElementwiseLoss {
  const char* op;
  int reduction;  // index of that argument
} kForward[] = {{"mse_loss", 2},         {"smooth_l1_loss", 2},
                {"huber_loss", 2},       {"binary_cross_entropy", 3},
                {"soft_margin_loss", 2}, {"binary_cross_entropy_with_logits", 4}},
  kBackward[] = {{"mse_loss_backward", 3},
                 {"smooth_l1_loss_backward", 3},
                 {"huber_loss_backward", 3},
                 {"binary_cross_entropy_backward", 4},
                 {"soft_margin_loss_backward", 3}};

}  // namespace

void register_loss(Registry& to) {
  Family family(to, "loss");
  auto special = [](const char* op) { return "tessera::" + std::string(op) + "_of"; };  // mse_loss_of(..., count)
  for (const auto& row : kForward)
    family.op(row.op,
              [&row, name = special(row.op)](const OpQuery& q) { return elementwise_loss(q, row.reduction, name); });
  for (const auto& row : kBackward)
    family.op(row.op, [&row, name = special(row.op)](const OpQuery& q) {
      return elementwise_loss_backward(q, row.reduction, name);
    });
  family.op("nll_loss_forward", [](const OpQuery& q) { return nll_loss(q, "tessera::nll_loss_mean"); });
  family.op("nll_loss2d_forward", [](const OpQuery& q) { return nll_loss(q, "tessera::nll_loss2d_mean"); });
  family.op("nll_loss_backward", nll_loss_backward);
  family.op("nll_loss2d_backward", nll_loss_backward);
}

}  // namespace tessera::rules
