#include "tessera/base/error.h"
#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

// Layer, RMS, group and batch norm. The dims over which an op computes statistics must not be sharded. Other dims can
// be. The gradients of weight and bias are sums over those other dims, so they are partial.
namespace tessera::rules {
namespace {

// Sizes of mean and rstd: the dims before the normalised ones, then 1 for each of those.
Sizes statistics_sizes(c10::IntArrayRef sizes, size_t normalized) {
  Sizes result(sizes);
  for (size_t d = sizes.size() - normalized; d < sizes.size(); d++) result[d] = 1;
  return result;
}

// The number of dims before the normalised ones.
size_t leading_dims(const OpQuery& query, const TensorArg& input, size_t normalized) {
  TESSERA_CHECK(normalized >= 1 && normalized <= input.sizes.size(), UsageError, query.schema.operator_name(),
                ": a normalized_shape of ", normalized, " dims for an input of sizes ", input.sizes);
  return input.sizes.size() - normalized;
}

// native_layer_norm(input, normalized_shape, weight, bias, eps) -> out, mean, rstd
// _fused_rms_norm(input, normalized_shape, weight, eps)         -> out, rstd
Rule layer_norm(const OpQuery& query) {
  const auto& input = query.tensor(0);
  auto normalized = query.ints_at(1).size();
  const auto leading = leading_dims(query, input, normalized);
  Rule rule;
  rule.outs.assign(static_cast<size_t>(fresh_outputs(query.schema)),
                   contiguous_out(statistics_sizes(input.sizes, normalized)));
  rule.outs[0] = contiguous_out(input.sizes);
  rule.flops = 4.0 * static_cast<double>(numel_of(input.sizes));
  add_replicated_strategy(rule, query);
  for (size_t d = 0; d < leading; d++) {
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
  const auto leading = leading_dims(query, input, normalized.size());
  auto mask = query.args[static_cast<size_t>(mask_arg)].toBoolList();
  Rule rule;
  rule.outs.assign(outs, contiguous_out(normalized));
  rule.outs[0] = contiguous_out(input.sizes);
  rule.flops = 8.0 * static_cast<double>(numel_of(input.sizes));
  add_replicated_strategy(rule, query);
  for (size_t d = 0; d < leading; d++) {
    StrategyBuilder strategy(rule, query);
    auto shard = S(static_cast<int64_t>(d));
    strategy.in(0, shard).in(1, shard);
    for (int arg : statistics) strategy.in(arg, shard);
    strategy.out(0, shard);
    for (size_t i = 1; i < outs; i++) strategy.out(i, Psum);
  }
  drop_masked_outputs(rule, mask);
  return rule;
}

// native_group_norm(input, weight, bias, N, C, HxW, group, eps). A group spans channels and spatial dims, so only the
// batch can be sharded. N becomes the local batch size.
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
  strategy.in(0, S(0)).in(1, S(0)).in(2, S(0)).in(3, S(0)).out(0, S(0)).out(1, Psum).out(2, Psum);
  drop_masked_outputs(rule, mask);
  return rule;
}

// Batch norm computes statistics over the batch and the spatial dims, one for each channel. Channels can be sharded. In
// training the batch must not be sharded. With given statistics the op is elementwise, and the batch can be sharded
// too. ATen's kernels throw for an empty local tensor; tessera::*_or_zeros gives zeros of the local sizes.
//   native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps) -> out, mean, invstd
Rule batch_norm(const OpQuery& query, int training_arg, const std::string& special) {
  const auto& input = query.tensor(0);
  bool training = query.bool_at(training_arg);
  Sizes statistics = {training ? input.sizes[1] : 0};
  Rule rule;
  rule.outs = {{Sizes(input.sizes), is_channels_last(input.sizes, input.strides) ? Sizes(input.strides) : Sizes{}},
               contiguous_out(statistics),
               contiguous_out(statistics)};
  set_special_with_out_sizes(rule, special);
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
  set_special_with_out_sizes(rule, "tessera::native_batch_norm_backward_or_zeros");
  add_replicated_strategy(rule, query);
  StrategyBuilder by_channel(rule, query);
  by_channel.in(0, S(1)).in(1, S(1)).out(0, S(1)).out(1, S(0)).out(2, S(0)).special();
  for (int arg : {2, 3, 4}) by_channel.in(arg, S(0));
  if (training) by_channel.in(5, S(0)).in(6, S(0));  // otherwise they are empty
  if (!training) StrategyBuilder(rule, query).in(0, S(0)).in(1, S(0)).out(0, S(0)).out(1, Psum).out(2, Psum).special();
  drop_masked_outputs(rule, mask);
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
