#include "tessera/tensor_parallel/context_parallel.h"

#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/detail/shard.h"
#include "tessera/tensor_parallel/detail/context_state.h"
#include "tessera/tensor_parallel/detail/plain_dropout.h"
#include "tessera/tensor_parallel/detail/token_mixing.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>

#include <cmath>
#include <numeric>
#include <vector>

namespace tessera {
namespace {

thread_local std::shared_ptr<const ContextParallelState> scope_state;

// The parts of a sequence that a rank has, of `parts_of(state)` parts, in ascending order.
std::vector<int64_t> parts_of_rank(const ContextParallelState& state, int64_t rank) {
  if (state.load_balance == LoadBalance::None) return {rank};
  return {rank, 2 * state.ranks() - 1 - rank};
}
int64_t parts_of(const ContextParallelState& state) {
  return state.load_balance == LoadBalance::None ? state.ranks() : 2 * state.ranks();
}

std::shared_ptr<const ContextParallelState> make_state(const DeviceMesh& mesh, const ContextParallelOptions& options) {
  const bool ulysses = options.method == ContextMethod::Ulysses;
  const LoadBalance balance = options.load_balance.value_or(ulysses ? LoadBalance::None : LoadBalance::HeadTail);
  TESSERA_CHECK(
      !ulysses || balance == LoadBalance::None, UsageError,
      "ContextParallel: Ulysses with LoadBalance::HeadTail. Its ranks attend to all tokens, so their work is ",
      "balanced: write LoadBalance::None");
  TESSERA_CHECK(!ulysses || !options.documents.defined(), UsageError,
                "ContextParallel: Ulysses with documents. Pass an attn_mask of all tokens to the attention instead");
  TESSERA_CHECK(!options.documents.defined() || options.documents.dim() <= 2, UsageError,
                "ContextParallel: documents of sizes ",
                options.documents.defined() ? options.documents.sizes() : at::IntArrayRef(),
                ". Write ids of sizes (t) or (B, t)");
  return std::make_shared<ContextParallelState>(
      ContextParallelState{mesh.get_group(), options.method, options.rotate, balance, options.documents});
}

// `dim` of x runs over tokens of this rank.
at::Tensor noted(at::Tensor x, int64_t dim) {
  if (auto* check = TokenMixingCheck::current()) check->note_tokens(x, dim);
  return x;
}

}  // namespace

const std::shared_ptr<const ContextParallelState>& current_context_parallel() { return scope_state; }

ContextParallel::ContextParallel(const DeviceMesh& mesh, const ContextParallelOptions& options)
    : state_(make_state(mesh, options)), before_(scope_state) {
  install_plain_dropout();
  scope_state = state_;
  if (!options.check_ops || state_->ranks() == 1) return;
  check_ = std::make_unique<TokenMixingCheck>();
  if (state_->documents.defined()) check_->note_tokens(state_->documents, -1);
}
ContextParallel::~ContextParallel() { scope_state = before_; }

at::Tensor ContextParallel::shard(const at::Tensor& full, int64_t dim) const {
  const int64_t parts = parts_of(*state_), size = full.size(dim);
  TESSERA_CHECK(size % parts == 0, UsageError, "ContextParallel::shard: dim ", dim, " of sizes ", full.sizes(), " has ",
                size, " tokens, and ", state_->ranks(), " ranks",
                state_->load_balance == LoadBalance::HeadTail ? " with LoadBalance::HeadTail" : "",
                " need a multiple of ", parts, ". Pad the sequences to ", (size + parts - 1) / parts * parts);
  const std::vector<at::Tensor> all = full.chunk(parts, dim);
  std::vector<at::Tensor> mine;
  for (const int64_t part : parts_of_rank(*state_, state_->rank())) mine.push_back(all[part]);
  return noted(mine.size() == 1 ? mine[0].contiguous() : at::cat(mine, dim), dim);
}

at::Tensor ContextParallel::unshard(const at::Tensor& local, int64_t dim) const {
  const at::NoGradGuard no_grad;
  const int64_t ranks = state_->ranks();
  const std::vector<int64_t> sizes(ranks, local.size(dim));
  const at::Tensor all =
      funcol::all_gather(local.detach().contiguous(), dim < 0 ? dim + local.dim() : dim, sizes, state_->group);
  funcol::wait(all, state_->group);
  if (state_->load_balance == LoadBalance::None) return all;
  const std::vector<at::Tensor> found = all.chunk(parts_of(*state_), dim);
  std::vector<at::Tensor> ordered(found.size());
  for (int64_t rank = 0, next = 0; rank < ranks; ++rank)
    for (const int64_t part : parts_of_rank(*state_, rank)) ordered[part] = found[next++];
  return at::cat(ordered, dim);
}

at::Tensor sequence_positions(int64_t length, c10::Device device) {
  if (!scope_state) return at::arange(length, device);
  const std::vector<int64_t> parts = parts_of_rank(*scope_state, scope_state->rank());
  const int64_t size = length / static_cast<int64_t>(parts.size());
  std::vector<at::Tensor> positions;
  for (const int64_t part : parts) positions.push_back(at::arange(part * size, (part + 1) * size, device));
  return noted(positions.size() == 1 ? positions[0] : at::cat(positions), 0);
}

int64_t sequence_length(int64_t length) { return scope_state ? length * scope_state->ranks() : length; }

at::Tensor context_parallel_attention(const std::shared_ptr<const ContextParallelState>& state, const at::Tensor& q,
                                      const at::Tensor& key, const at::Tensor& value,
                                      const std::optional<at::Tensor>& mask, double dropout_p, bool causal,
                                      std::optional<double> scale, bool gqa, Attention plain) {
  TESSERA_CHECK(dropout_p == 0, UsageError, "scaled_dot_product_attention in a ContextParallel has dropout_p ",
                dropout_p, ". Write 0: a mask of all tokens would be needed");
  TESSERA_CHECK(q.dim() >= 3 && q.size(-2) == key.size(-2) && q.size(-2) == value.size(-2), UsageError,
                "scaled_dot_product_attention in a ContextParallel: query, key and value have sizes ", q.sizes(), ", ",
                key.sizes(), " and ", value.sizes(), ". Each rank needs as many keys as queries (..., heads, t, D)");
  const TokenMixingAllowed attends_to_all_ranks;
  const int64_t shared = gqa ? q.size(-3) / key.size(-3) : 1;
  const at::Tensor k = shared > 1 ? key.repeat_interleave(shared, -3) : key;
  const at::Tensor v = shared > 1 ? value.repeat_interleave(shared, -3) : value;
  if (state->method == ContextMethod::Ulysses) {
    TESSERA_CHECK(q.size(-3) % state->ranks() == 0, UsageError, "Ulysses context parallelism: ", q.size(-3),
                  " heads cannot be divided among ", state->ranks(),
                  " ranks. Write ContextMethod::Ring, or another number of ranks");
    const at::Tensor all = gather_tokens_scatter_heads(state->group, at::cat({q, k, v}, -1));
    const std::vector<at::Tensor> parts = all.split_with_sizes({q.size(-1), k.size(-1), v.size(-1)}, -1);
    const at::Tensor result = plain(parts[0], parts[1], parts[2], mask, 0.0, causal, scale, false);
    return noted(gather_heads_scatter_tokens(state->group, result), -2);
  }
  TESSERA_CHECK(!mask || !mask->defined(), UsageError, "scaled_dot_product_attention in a ring ContextParallel has an ",
                "attn_mask. Write ContextParallelOptions::documents, is_causal, or ContextMethod::Ulysses");
  TESSERA_CHECK(state->load_balance == LoadBalance::None || q.size(-2) % 2 == 0, UsageError,
                "scaled_dot_product_attention in a ContextParallel with LoadBalance::HeadTail: this rank has ",
                q.size(-2), " tokens. It needs an even number: shard with ContextParallel::shard");
  const double factor = scale.value_or(1 / std::sqrt(static_cast<double>(q.size(-1))));
  return noted(ring_attention(state, q, k, v, causal, factor), -2);
}

at::Tensor context_parallel_attention_of_dtensors(const std::shared_ptr<const ContextParallelState>& state,
                                                  const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                  const std::optional<at::Tensor>& mask, double dropout_p, bool causal,
                                                  std::optional<double> scale, bool gqa, Attention plain) {
  for (const at::Tensor* x : {&q, &k, &v}) {
    TESSERA_CHECK(is_dtensor(*x), UsageError,
                  "scaled_dot_product_attention in a ContextParallel: query, key and value ",
                  "are plain tensors and DTensors. Pass three DTensors or three plain tensors");
    const DTensor distributed(*x);
    for (const Placement& placement : distributed.placements())
      TESSERA_CHECK(distributed.placements() == DTensor(q).placements() &&
                        (placement.is_replicate() || (placement.is_sharded() && placement.dim < x->dim() - 2)),
                    UsageError, "scaled_dot_product_attention in a ContextParallel: DTensors have placements ",
                    to_string(DTensor(q).placements()), ", ", to_string(DTensor(k).placements()), " and ",
                    to_string(DTensor(v).placements()),
                    ". Redistribute all three to the same placement over heads or batch, such as S(1)");
  }
  const DTensor query(q);
  const at::Tensor local =
      context_parallel_attention(state, query.to_local(), DTensor(k).to_local(), DTensor(v).to_local(), mask, dropout_p,
                                 causal, scale, gqa, plain);
  std::vector<int64_t> sizes = q.sizes().vec();
  sizes.back() = v.size(-1);
  const auto strides = contiguous_strides(sizes);
  return DTensor::from_local(local.contiguous(), query.device_mesh(), query.placements(),
                             {.shape = sizes, .stride = std::vector<int64_t>(strides.begin(), strides.end())});
}

}  // namespace tessera
