#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/tensor_parallel/context_parallel.h"

namespace tessera {

// What the attention ops need of a ContextParallel. Backward keeps it after the scope.
struct ContextParallelState {
  comm::Group group;
  ContextMethod method;
  RotateMethod rotate;
  LoadBalance load_balance;
  at::Tensor documents;

  int64_t ranks() const { return group->size(); }
  int64_t rank() const { return group->rank(); }
};

// The state of the innermost ContextParallel of this thread, or null.
const std::shared_ptr<const ContextParallelState>& current_context_parallel();

// Attention of q, k, v (..., heads, t, D) with the tokens of this rank.
at::Tensor ring_attention(const std::shared_ptr<const ContextParallelState>& state, const at::Tensor& q,
                          const at::Tensor& k, const at::Tensor& v, bool causal, double scale);

// x (..., heads, t, D) of all ranks to (..., heads / n, T, D), and back. Differentiable.
at::Tensor gather_tokens_scatter_heads(const comm::Group& group, const at::Tensor& x);
at::Tensor gather_heads_scatter_tokens(const comm::Group& group, const at::Tensor& x);

// The decomposition of LibTorch.
using Attention = at::Tensor (*)(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const std::optional<at::Tensor>& mask, double dropout_p, bool causal,
                                 std::optional<double> scale, bool gqa);
// scaled_dot_product_attention in the scope of a ContextParallel. `plain` is the attention of one rank.
at::Tensor context_parallel_attention(const std::shared_ptr<const ContextParallelState>& state, const at::Tensor& q,
                                      const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
                                      double dropout_p, bool causal, std::optional<double> scale, bool gqa,
                                      Attention plain);
// The same on DTensors whose placements shard batch or heads, such as S(1) over tp. Their tokens are those of this
// rank.
at::Tensor context_parallel_attention_of_dtensors(const std::shared_ptr<const ContextParallelState>& state,
                                                  const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                  const std::optional<at::Tensor>& mask, double dropout_p, bool causal,
                                                  std::optional<double> scale, bool gqa, Attention plain);

}  // namespace tessera
