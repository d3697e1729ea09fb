#include "tessera/rules/detail/build.h"
#include "tessera/rules/detail/families.h"

// Scaled dot product attention as LibTorch runs it on a CPU. Query, key and value are (batch, heads, sequence,
// features). Batch entries and heads are independent. Positions of the query are independent too, except with
// is_causal, whose mask counts positions from the first one. ATen's kernels stop the process for a local tensor without
// heads; tessera::*_or_zeros does not call them then.
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

}  // namespace

void register_attention(Registry& to) {
  Family family(to, "attention");
  family.op("_scaled_dot_product_flash_attention_for_cpu", attention);
  family.op("_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward);
}

}  // namespace tessera::rules
