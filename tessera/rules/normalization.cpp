#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

// Layer, RMS, group and batch norm. Each has dims over which it takes statistics, which must be whole; any other may be
// cut. Gradients of weight and bias sum over those others: Partial.
namespace tessera::rules {
namespace {

// Sizes of mean and rstd: the dims before the normalised ones, then 1 for each of those.
Sizes statistics_sizes(c10::IntArrayRef sizes, size_t normalized) {
  Sizes result(sizes);
  for (size_t d = sizes.size() - normalized; d < sizes.size(); d++) result[d] = 1;
  return result;
}

// native_layer_norm(input, normalized_shape, weight, bias, eps) -> out, mean, rstd
// _fused_rms_norm(input, normalized_shape, weight, eps)         -> out, rstd
Rule layer_norm(const OpQuery& query) {
  const auto& input = query.tensor(0);
  auto normalized = query.ints_at(1).size();
  Rule rule;
  rule.outs.assign(static_cast<size_t>(fresh_outputs(query.schema)),
                   contiguous_out(statistics_sizes(input.sizes, normalized)));
  rule.outs[0] = contiguous_out(input.sizes);
  rule.flops = 4.0 * static_cast<double>(numel_of(input.sizes));
  add_replicated_strategy(rule, query);
  for (size_t d = 0; d < input.sizes.size() - normalized; d++) {
    StrategyBuilder strategy(rule, query);
    strategy.in(0, S(static_cast<int64_t>(d)));
    for (size_t i = 0; i < rule.outs.size(); i++) strategy.out(i, S(static_cast<int64_t>(d)));
  }
  return rule;
}

// native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, mask) -> input, weight, bias
// _fused_rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, mask)               -> input, weight
Rule layer_norm_backward(const OpQuery& query, std::initializer_list<int> statistics, int mask_arg, size_t outs) {
  const auto& input = query.tensor(1);
  auto normalized = query.ints_at(2);
  auto mask = query.args[static_cast<size_t>(mask_arg)].toBoolList();
  Rule rule;
  rule.outs.assign(outs, contiguous_out(normalized));
  rule.outs[0] = contiguous_out(input.sizes);
  rule.flops = 8.0 * static_cast<double>(numel_of(input.sizes));
  add_replicated_strategy(rule, query);
  for (size_t d = 0; d < input.sizes.size() - normalized.size(); d++) {
    StrategyBuilder strategy(rule, query);
    auto cut = S(static_cast<int64_t>(d));
    strategy.in(0, cut).in(1, cut);
    for (int arg : statistics) strategy.in(arg, cut);
    strategy.out(0, cut);
    for (size_t i = 1; i < outs; i++) strategy.out(i, Psum);
  }
  for (size_t i = 0; i < outs; i++)
    if (!mask[i]) {
      rule.outs[i] = {};
      for (auto& strategy : rule.strategies) strategy.out[i] = R;
    }
  return rule;
}

// native_group_norm(input, weight, bias, N, C, HxW, group, eps): a group lies across channels and places, so only the
// batch may be cut; N is the local one.
Rule group_norm(const OpQuery& query) {
  const auto& input = query.tensor(0);
  Sizes statistics = {query.int_at(3), query.int_at(6)};
  Rule rule;
  rule.outs = {{Sizes(input.sizes), is_channels_last(input.sizes, input.strides) ? Sizes(input.strides) : Sizes{}},
               contiguous_out(statistics),
               contiguous_out(statistics)};
  rule.fixes = {{.arg = 3, .what = ArgFix::What::InSize, .tensor = query.index_of(0), .dim = 0}};
  add_replicated_strategy(rule, query);
  StrategyBuilder(rule, query).in(0, S(0)).out(0, S(0)).out(1, S(0)).out(2, S(0));
  return rule;
}

// native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, mask)
Rule group_norm_backward(const OpQuery& query) {
  const auto& input = query.tensor(1);
  auto mask = query.args[9].toBoolList();
  Rule rule;
  Sizes channels = {query.int_at(6)};
  rule.outs = {contiguous_out(input.sizes), contiguous_out(channels), contiguous_out(channels)};
  rule.fixes = {{.arg = 5, .what = ArgFix::What::InSize, .tensor = query.index_of(1), .dim = 0}};
  add_replicated_strategy(rule, query);
  StrategyBuilder strategy(rule, query);
  strategy.in(0, S(0)).in(1, S(0)).in(2, S(0)).in(3, S(0));
  const Placement cut_batch[] = {S(0), Psum, Psum};
  for (size_t i = 0; i < 3; i++) {
    if (mask[i])
      strategy.out(i, cut_batch[i]);
    else
      rule.outs[i] = {};
  }
  return rule;
}

// Batch norm takes statistics over batch and places, one for each channel. Channels may be cut. In training the batch
// must be whole; with given statistics it is elementwise, and the batch may be cut too. ATen's kernels refuse an empty
// piece: tessera::*_or_zeros makes zeros of the sizes of the piece.
//   native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps) -> out, mean, invstd
Rule batch_norm(const OpQuery& query, int training_arg, const std::string& special) {
  const auto& input = query.tensor(0);
  bool training = query.bool_at(training_arg);
  Sizes statistics = {training ? input.sizes[1] : 0};
  Rule rule;
  rule.outs = {{Sizes(input.sizes), is_channels_last(input.sizes, input.strides) ? Sizes(input.strides) : Sizes{}},
               contiguous_out(statistics),
               contiguous_out(statistics)};
  rule.special = special;
  for (int i = 0; i < 3; i++) rule.special_fixes.push_back({.arg = -1, .what = ArgFix::What::OutSizes, .tensor = i});
  add_replicated_strategy(rule, query);
  StrategyBuilder channels(rule, query);
  channels.in(0, S(1)).out(0, S(1)).special();
  for (int arg = 1; arg < training_arg; arg++) channels.in(arg, S(0));
  if (training) channels.out(1, S(0)).out(2, S(0));
  if (!training) StrategyBuilder(rule, query).in(0, S(0)).out(0, S(0));
  return rule;
}

// native_batch_norm_backward(grad, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, mask)
Rule batch_norm_backward(const OpQuery& query) {
  const auto& input = query.tensor(1);
  bool training = query.bool_at(7);
  auto mask = query.args[9].toBoolList();
  Sizes channels = {input.sizes[1]};
  Rule rule;
  rule.outs = {{Sizes(input.sizes), is_channels_last(input.sizes, input.strides) ? Sizes(input.strides) : Sizes{}},
               contiguous_out(channels),
               contiguous_out(channels)};
  rule.special = "tessera::native_batch_norm_backward_or_zeros";
  for (int i = 0; i < 3; i++) rule.special_fixes.push_back({.arg = -1, .what = ArgFix::What::OutSizes, .tensor = i});
  add_replicated_strategy(rule, query);
  StrategyBuilder by_channel(rule, query);
  by_channel.in(0, S(1)).in(1, S(1)).out(0, S(1)).out(1, S(0)).out(2, S(0)).special();
  for (int arg : {2, 3, 4}) by_channel.in(arg, S(0));
  if (training) by_channel.in(5, S(0)).in(6, S(0));  // otherwise they are empty
  if (!training) StrategyBuilder(rule, query).in(0, S(0)).in(1, S(0)).out(0, S(0)).out(1, Psum).out(2, Psum).special();
  for (size_t i = 0; i < 3; i++)
    if (!mask[i]) {
      rule.outs[i] = {};
      for (auto& strategy : rule.strategies) strategy.out[i] = R;
    }
  return rule;
}

}  // namespace

void register_normalization(Registry& to) {
  Family family(to, "normalization");
  family.op("native_layer_norm", layer_norm);
  family.op("native_layer_norm_backward", [](const OpQuery& q) { return layer_norm_backward(q, {3, 4}, 7, 3); });
  family.op("_fused_rms_norm", layer_norm);
  family.op("_fused_rms_norm_backward", [](const OpQuery& q) { return layer_norm_backward(q, {3}, 5, 2); });
  family.op("native_group_norm", group_norm);
  family.op("native_group_norm_backward", group_norm_backward);
  family.op("native_batch_norm",
            [](const OpQuery& q) { return batch_norm(q, 5, "tessera::native_batch_norm_or_zeros"); });
  family.op("_native_batch_norm_legit",
            [](const OpQuery& q) { return batch_norm(q, 5, "tessera::_native_batch_norm_legit_or_zeros"); });
  family.op("_native_batch_norm_legit.no_stats",
            [](const OpQuery& q) { return batch_norm(q, 3, "tessera::_native_batch_norm_legit_or_zeros.no_stats"); });
  family.op("native_batch_norm_backward", batch_norm_backward);
}

}  // namespace tessera::rules
