#pragma once
#include "tessera/mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

// Context parallelism (PyTorch: torch.distributed.tensor.experimental.context_parallel): every rank has a part of each
// sequence. All layers but attention work on single tokens. In the scope of a ContextParallel,
// torch::scaled_dot_product_attention attends to the keys of all ranks.
//
//   ContextParallel cp(mesh["cp"]);                              // in this scope and thread
//   auto logits = model(cp.shard(tokens, 1));                    // (B, T / n) tokens
//   auto loss = models::loss(logits, cp.shard(targets, 1));      // over the tokens of this rank
//   loss.backward();                                             // then average gradients over cp, as over dp
//
// Composable with tensor parallelism: each rank then has a part of the heads and a part of the sequence.
namespace tessera {

// How the ranks exchange keys and values.
enum class ContextMethod : uint8_t {
  Ring,     // each rank attends with its queries, all heads, to the keys of one rank after the other
  Ulysses,  // all-to-all: each rank gets all tokens of a part of the heads; the number of heads must be divisible
};
// How a ring moves keys and values (PyTorch: set_rotate_method).
enum class RotateMethod : uint8_t {
  AllGather,  // one all-gather; each rank has the keys and values of all ranks for the time of one attention
  AllToAll,   // ranks - 1 exchanges with the neighbours; each rank has those of two ranks
};
// Which tokens a rank has.
enum class LoadBalance : uint8_t {
  None,      // rank i has the i-th of n parts
  HeadTail,  // zigzag: rank i has the parts i and 2n - 1 - i of 2n, so causal masks give all ranks the same work
};

// Options of ContextParallel.
struct ContextParallelOptions {
  ContextMethod method = ContextMethod::Ring;
  RotateMethod rotate = RotateMethod::AllGather;  // of a ring
  // None: HeadTail for a ring, None for Ulysses, whose work is always balanced.
  std::optional<LoadBalance> load_balance = {};
  // Document ids of the tokens of this rank, (t) or (B, t): a token attends only to tokens of its document. For a ring.
  at::Tensor documents = {};
  // Throw where another op than this attention mixes tokens: see ContextParallel. Costs about a microsecond per op, and
  // compiled functions run op by op in the scope. Write false for a model that was checked once.
  bool check_ops = true;
};

// While alive, torch::scaled_dot_product_attention of this thread is context-parallel: its inputs (..., heads, t, D)
// have the t tokens of this rank, and its result has too. They may be DTensors that are sharded over heads or batch.
// Differentiable; backward() may run after the scope, unless it recomputes an activation checkpoint. Attention with
// dropout_p is an error. So is an attn_mask with a ring: pass `documents` instead.
//
// Other ops that mix tokens would see those of this rank only. They throw UsageError: a product of tokens with tokens
// (torch::nn::MultiheadAttention, torch::nn::Transformer), a softmax, scan, flip or norm over the sequence,
// convolutions, pooling and RNNs. Sums and means over the sequence are those of this rank, as the loss is.
//
// Collectives of one attention on n ranks:
//
//   AllGather   forward 1 all_gather;  backward 1 all_gather, 1 reduce_scatter
//   AllToAll    forward n-1 all_to_all;  backward 2n-1 all_to_all
//   Ulysses     forward 2 all_to_all;  backward 2 all_to_all          (documents: 1 all_gather per forward)
class ContextParallel {
 public:
  // A 1-D mesh. No communication. Throws UsageError if the options do not fit together.
  explicit ContextParallel(const DeviceMesh& mesh, const ContextParallelOptions& options = {});
  ~ContextParallel();
  ContextParallel(const ContextParallel&) = delete;
  ContextParallel& operator=(const ContextParallel&) = delete;

  // This rank's part of a tensor that all ranks have, along `dim`. Throws UsageError if the size is not divisible.
  at::Tensor shard(const at::Tensor& full, int64_t dim) const;
  // The inverse (PyTorch: context_parallel_unshard). Communicates. Not differentiable.
  at::Tensor unshard(const at::Tensor& local, int64_t dim) const;

 private:
  std::shared_ptr<const struct ContextParallelState> state_;
  std::shared_ptr<const struct ContextParallelState> before_;
  std::unique_ptr<class TokenMixingCheck> check_;
};

// The positions in their sequences of the `length` tokens that this rank has: for rotary and learned position
// embeddings. Outside of a ContextParallel: 0 to length - 1.
at::Tensor sequence_positions(int64_t length, c10::Device device);
// The number of tokens of the sequences of which this rank has `length`. Outside of a ContextParallel: length.
int64_t sequence_length(int64_t length);

}  // namespace tessera
