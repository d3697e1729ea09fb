#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"
#include "tessera/rules/detail/geometry.h"

// Scaled dot product attention. Query, key and value are (batch, heads, sequence, features). Batch entries and heads
// are independent. Positions of the query are independent too, except with is_causal, whose mask counts positions from
// the first one. ATen's kernels stop the process for a local tensor without heads; tessera::*_or_zeros does not call
// them then.
namespace tessera::rules {
namespace {

// (B, H, S, D) with the memory layout (B, S, H, D).
OutInfo heads_inside(c10::IntArrayRef s) { return {Sizes(s), Sizes{s[1] * s[2] * s[3], s[3], s[1] * s[3], 1}}; }

double attention_flops(c10::IntArrayRef query, c10::IntArrayRef key) {
  return 2.0 * static_cast<double>(numel_of(query)) * static_cast<double>(key[2]);
}

// The placement of a mask (S, T) or (B or 1, H or 1, S, T), which is broadcast to the scores.
Placement mask_placement(const TensorArg& mask, c10::IntArrayRef query, c10::IntArrayRef key, int64_t d) {
  Sizes scores = {query[0], query[1], query[2], key[2]};
  return broadcast_shard(mask, scores, d);
}

// ...(query, key, value, dropout_p, is_causal, *, attn_mask, scale) -> output, logsumexp
Rule attention(const OpQuery& query) {
  auto q = query.tensor(0).sizes, k = query.tensor(1).sizes, v = query.tensor(2).sizes;
  bool causal = query.bool_at(4);
  Rule rule;
  rule.outs = {contiguous_out({q[0], q[1], q[2], v[3]}), {Sizes{q[0], q[1], q[2]}, Sizes{q[1] * q[2], 1, q[1]}}};
  rule.flops = attention_flops(q, k);
  set_special_with_out_sizes(rule, "tessera::_scaled_dot_product_flash_attention_for_cpu_or_zeros");
  add_replicated_strategy(rule, query);
  for (int64_t d : {0, 1, 2}) {
    bool also_in_key = d < 2;
    // Key has fewer heads than query: they cannot be sharded together.
    if (also_in_key ? q[d] != k[d] : causal) continue;
    StrategyBuilder strategy(rule, query);
    strategy.in(0, S(d)).out(0, S(d)).out(1, S(d)).special();
    if (also_in_key) strategy.in(1, S(d)).in(2, S(d));
    if (const auto* mask = query.find_tensor(5)) strategy.in(5, mask_placement(*mask, q, k, d));
  }
  return rule;
}

// ...backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask, scale) -> query, key,
// value
Rule attention_backward(const OpQuery& query) {
  auto q = query.tensor(1).sizes, k = query.tensor(2).sizes, v = query.tensor(3).sizes;
  bool causal = query.bool_at(7);
  Rule rule;
  rule.outs = {heads_inside(q), heads_inside(k), heads_inside(v)};
  rule.flops = 2.5 * attention_flops(q, k);
  set_special_with_out_sizes(rule, "tessera::_scaled_dot_product_flash_attention_for_cpu_backward_or_zeros");
  add_replicated_strategy(rule, query);
  for (int64_t d : {0, 1, 2}) {
    bool also_in_key = d < 2;
    if (also_in_key ? q[d] != k[d] : causal) continue;
    StrategyBuilder strategy(rule, query);
    strategy.special();
    for (int arg : {0, 1, 4, 5}) strategy.in(arg, S(d));
    strategy.out(0, S(d));
    // Every query position contributes to the gradients of key and value.
    for (int i : {1, 2}) strategy.out(static_cast<size_t>(i), also_in_key ? S(d) : Psum);
    if (also_in_key) strategy.in(2, S(d)).in(3, S(d));
    if (const auto* mask = query.find_tensor(8)) strategy.in(8, mask_placement(*mask, q, k, d));
  }
  return rule;
}

// ---- kernels for CUDA ----

// Arguments of one op. Batch entries and heads are sharded. Positions are not, because the ops return the lengths of
// the sequences, and the log-sum-exp of some kernels is padded.
struct FusedAttention {
  std::string special;
  int first;              // the argument `query`; key and value follow
  std::vector<int> like;  // other arguments with the batch and the heads of the query: output, its gradient, logsumexp
  int bias = -1;
  std::vector<size_t> sharded_outs;  // results with batch and heads; the others are states of the random generator
  int bias_gradient = -1;
};

Rule fused_attention(const OpQuery& query, const FusedAttention& op, std::vector<OutInfo> outs, double share_of_flops) {
  const auto q = query.tensor(op.first).sizes, k = query.tensor(op.first + 1).sizes;
  Rule rule;
  rule.outs = std::move(outs);
  rule.flops = share_of_flops * attention_flops(q, k);
  set_special_with_out_sizes(rule, op.special);
  add_replicated_strategy(rule, query);
  for (int64_t d : {0, 1}) {
    if (q[d] != k[d]) continue;
    StrategyBuilder strategy(rule, query);
    strategy.special();
    for (int arg : {op.first, op.first + 1, op.first + 2}) strategy.in(arg, S(d));
    for (int arg : op.like) strategy.in(arg, S(d));
    for (auto i : op.sharded_outs) strategy.out(i, S(d));
    const auto* bias = op.bias < 0 ? nullptr : query.find_tensor(op.bias);
    if (!bias) continue;
    const auto placement = mask_placement(*bias, q, k, d);
    strategy.in(op.bias, placement);
    // A bias that is broadcast along d gets a sum over all shards as its gradient.
    if (op.bias_gradient >= 0 && !rule.outs[static_cast<size_t>(op.bias_gradient)].sizes.empty())
      strategy.out(static_cast<size_t>(op.bias_gradient), placement.is_sharded() ? placement : Psum);
  }
  return rule;
}

// The result of empty_like(t) with another number of features.
OutInfo like_tensor_with(const TensorArg& t, int64_t features) {
  const Sizes sizes = {t.sizes[0], t.sizes[1], t.sizes[2], features};
  return {sizes, dense_strides(sizes, t.strides)};
}

std::vector<OutInfo> gradients_like(const OpQuery& query, int first) {
  std::vector<OutInfo> outs;
  for (int arg : {first, first + 1, first + 2})
    outs.push_back(like_tensor_with(query.tensor(arg), query.tensor(arg).sizes[3]));
  return outs;
}

Rule gathered_attention() {  // return_debug_mask: the sizes of the mask depend on the kernel
  Rule rule;
  rule.gathered = true;
  return rule;
}

// (query, key, value, dropout_p, is_causal, return_debug_mask) -> output, logsumexp, cum_seq_q, cum_seq_k (undefined),
// max_q, max_k (ints), rng_state, unused, debug_attn_mask (without elements)
Rule flash_attention(const OpQuery& query) {
  if (query.bool_at(5)) return gathered_attention();
  const auto& q = query.tensor(0);
  return fused_attention(query,
                         {.special = "tessera::_scaled_dot_product_flash_attention_or_zeros",
                          .first = 0,
                          .like = {},
                          .sharded_outs = {0, 1}},
                         {like_tensor_with(q, q.sizes[3]),
                          contiguous_out({q.sizes[0], q.sizes[1], q.sizes[2]}),
                          {},
                          {},
                          contiguous_out({2}),
                          {},
                          contiguous_out({0})},
                         1);
}

// (grad_out, query, key, value, out, logsumexp, ...) -> gradients of query, key, value
Rule flash_attention_backward(const OpQuery& query) {
  return fused_attention(query,
                         {.special = "tessera::_scaled_dot_product_flash_attention_backward_or_zeros",
                          .first = 1,
                          .like = {0, 4, 5},
                          .sharded_outs = {0, 1, 2}},
                         gradients_like(query, 1), 2.5);
}

// (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal) -> output, logsumexp, philox_seed,
// philox_offset. The kernel pads the log-sum-exp to a multiple of 32 positions.
Rule efficient_attention(const OpQuery& query) {
  const auto q = query.tensor(0).sizes, v = query.tensor(2).sizes;
  const int64_t padded = query.bool_at(4) ? (q[2] + 31) / 32 * 32 : 0;
  return fused_attention(query,
                         {.special = "tessera::_scaled_dot_product_efficient_attention_or_zeros",
                          .first = 0,
                          .like = {},
                          .bias = 3,
                          .sharded_outs = {0, 1}},
                         {heads_inside(Sizes{q[0], q[1], q[2], v[3]}), contiguous_out({q[0], q[1], padded}), {}, {}},
                         1);
}

// (grad_out, query, key, value, attn_bias, out, logsumexp, ..., grad_input_mask, is_causal) -> gradients of query, key,
// value, attn_bias
Rule efficient_attention_backward(const OpQuery& query) {
  const auto q = query.tensor(1).sizes, k = query.tensor(2).sizes, v = query.tensor(3).sizes;
  const auto* bias = query.find_tensor(4);
  const bool wants_bias = bias && query.args[10].toBoolList()[3];
  return fused_attention(
      query,
      {.special = "tessera::_scaled_dot_product_efficient_attention_backward_or_zeros",
       .first = 1,
       .like = {0, 5, 6},
       .bias = 4,
       .sharded_outs = {0, 1, 2},
       .bias_gradient = 3},
      {heads_inside(q), heads_inside(k), heads_inside(v), wants_bias ? contiguous_out(bias->sizes) : OutInfo{}}, 2.5);
}

// (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask) -> the results of flash
// attention; logsumexp has one more dim
Rule cudnn_attention(const OpQuery& query) {
  if (query.bool_at(7)) return gathered_attention();
  const auto& q = query.tensor(0);
  return fused_attention(query,
                         {.special = "tessera::_scaled_dot_product_cudnn_attention_or_zeros",
                          .first = 0,
                          .like = {},
                          .bias = 3,
                          .sharded_outs = {0, 1}},
                         {like_tensor_with(q, query.tensor(2).sizes[3]),
                          contiguous_out({q.sizes[0], q.sizes[1], q.sizes[2], 1}),
                          {},
                          {},
                          {},
                          {},
                          {}},
                         1);
}

// (grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, ...) -> gradients of query, key,
// value
Rule cudnn_attention_backward(const OpQuery& query) {
  return fused_attention(query,
                         {.special = "tessera::_scaled_dot_product_cudnn_attention_backward_or_zeros",
                          .first = 1,
                          .like = {0, 4, 5},
                          .bias = 8,
                          .sharded_outs = {0, 1, 2}},
                         gradients_like(query, 1), 2.5);
}

}  // namespace

void register_attention(Registry& to) {
  Family family(to, "attention");
  family.op("_scaled_dot_product_flash_attention_for_cpu", attention);
  family.op("_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward);
  family.op("_scaled_dot_product_flash_attention", flash_attention);
  family.op("_scaled_dot_product_flash_attention_backward", flash_attention_backward);
  family.op("_scaled_dot_product_efficient_attention", efficient_attention);
  family.op("_scaled_dot_product_efficient_attention_backward", efficient_attention_backward);
  family.op("_scaled_dot_product_cudnn_attention", cudnn_attention);
  family.op("_scaled_dot_product_cudnn_attention_backward", cudnn_attention_backward);
}

}  // namespace tessera::rules
