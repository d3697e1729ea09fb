#include "tessera/base/detail/libtorch_autograd_compat.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/tensor_parallel/detail/block_attention.h"
#include "tessera/tensor_parallel/detail/context_state.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <vector>

// Ring attention. This rank i has queries; keys and values of all ranks j = i, i-1, ... pass by. What its queries
// attend to in a causal mask:
//
//   None      j < i: all queries to all keys         j = i: causal         j > i: nothing
//   HeadTail  rank j has the parts j and 2n-1-j of the sequence. Each part is a half of its tokens.
//             j < i: all queries to the first half   j = i: causal         j > i: the second half to all keys
//
// Documents: all queries to all keys, with a mask of positions and document ids.
namespace tessera {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using StatePtr = std::shared_ptr<const ContextParallelState>;

// The part of an attention between the queries of this rank and the keys of one rank.
struct RingBlock {
  bool empty = false;
  int64_t query_begin = 0;  // queries from here to the last
  int64_t keys = 0;         // keys 0 to here
  BlockMask mask = {};
};

// The positions of the tokens of a rank.
at::Tensor positions_of(const ContextParallelState& state, int64_t rank, int64_t length, c10::Device device) {
  const auto options = at::TensorOptions(at::kLong).device(device);
  if (state.load_balance == LoadBalance::None) return at::arange(rank * length, (rank + 1) * length, options);
  const int64_t half = length / 2, tail = 2 * state.ranks() - 1 - rank;
  return at::cat(
      {at::arange(rank * half, (rank + 1) * half, options), at::arange(tail * half, (tail + 1) * half, options)});
}

// `documents`: of all ranks, (n, t) or (n, B, t), or undefined.
RingBlock block_with(const ContextParallelState& state, int64_t other, int64_t length, bool causal,
                     const at::Tensor& documents) {
  RingBlock block{.keys = length};
  const int64_t rank = state.rank();
  if (documents.defined()) {
    const at::Tensor mine = documents[rank], theirs = documents[other];
    block.mask.visible = mine.unsqueeze(-1) == theirs.unsqueeze(-2);  // (t, t) or (B, t, t)
    if (causal)
      block.mask.visible =
          block.mask.visible.logical_and(positions_of(state, rank, length, documents.device()).unsqueeze(-1) >=
                                         positions_of(state, other, length, documents.device()).unsqueeze(-2));
    if (block.mask.visible.dim() == 3) block.mask.visible = block.mask.visible.unsqueeze(1);  // all heads
    return block;
  }
  if (!causal) return block;
  if (other == rank)
    block.mask.causal = true;
  else if (state.load_balance == LoadBalance::None)
    block.empty = other > rank;
  else if (other < rank)
    block.keys = length / 2;
  else
    block.query_begin = length / 2;
  return block;
}

at::Tensor from(const at::Tensor& x, int64_t begin) { return begin == 0 ? x : x.narrow(-2, begin, x.size(-2) - begin); }
at::Tensor first(const at::Tensor& x, int64_t size) { return size == x.size(-2) ? x : x.narrow(-2, 0, size); }

at::Tensor gathered(const at::Tensor& x, const comm::Group& group) {
  const at::Tensor all =
      funcol::all_gather(x.unsqueeze(0).contiguous(), 0, std::vector<int64_t>(group->size(), 1), group);
  funcol::wait(all, group);
  return all;
}

// Sends x to the next rank and returns that of the rank before. The result is pending.
at::Tensor start_rotation(const at::Tensor& x, const comm::Group& group) {
  const int64_t ranks = group->size(), rank = group->rank();
  std::vector<int64_t> send(ranks, 0), recv(ranks, 0);
  send[(rank + 1) % ranks] = recv[(rank + ranks - 1) % ranks] = x.numel();
  return funcol::all_to_all(x.contiguous().flatten(), 0, send, 0, recv, group);
}

// Calls visit(rank, keys and values of that rank) for all ranks, own first. `kv` is k and v, concatenated along D.
template <class Visit>
void for_each_rank(const ContextParallelState& state, const at::Tensor& kv, Visit visit) {
  const int64_t ranks = state.ranks(), rank = state.rank();
  at::Tensor all, current = kv;
  if (ranks > 1 && state.rotate == RotateMethod::AllGather) all = gathered(kv, state.group);
  for (int64_t step = 0; step < ranks; ++step) {
    const int64_t other = (rank + ranks - step) % ranks;
    at::Tensor next;
    if (all.defined())
      current = all[other];
    else if (step + 1 < ranks)
      next = start_rotation(current, state.group);  // while this rank computes
    visit(other, current);
    if (!next.defined()) continue;
    funcol::wait(next, state.group);
    current = next.view(kv.sizes());
  }
}

at::Tensor all_documents(const ContextParallelState& state) {
  return state.documents.defined() ? gathered(state.documents, state.group) : at::Tensor();
}

BlockResult ring_forward(const ContextParallelState& state, const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, bool causal, double scale, const at::Tensor& documents) {
  BlockResult merged;
  for_each_rank(state, at::cat({k, v}, -1), [&](int64_t other, const at::Tensor& kv) {
    const RingBlock block = block_with(state, other, q.size(-2), causal, documents);
    if (block.empty) return;
    const at::Tensor keys = first(kv.narrow(-1, 0, k.size(-1)), block.keys);
    const at::Tensor values = first(kv.narrow(-1, k.size(-1), v.size(-1)), block.keys);
    merge_block(merged, block_attention(from(q, block.query_begin), keys, values, block.mask, scale),
                block.query_begin);
  });
  return merged;
}

struct RingGradients {
  at::Tensor q;
  at::Tensor kv;  // concatenated along D
};

// Writes the gradients of one block into `dkv`, which is for all keys of a rank.
void write_gradients(at::Tensor dkv, const BlockGradients& found, const RingBlock& block) {
  const int64_t width = found.k.size(-1), rest = dkv.size(-2) - block.keys;
  first(dkv, block.keys).narrow(-1, 0, width).copy_(found.k);
  first(dkv, block.keys).narrow(-1, width, found.v.size(-1)).copy_(found.v);
  if (rest > 0) dkv.narrow(-2, block.keys, rest).zero_();
}

RingGradients ring_backward(const ContextParallelState& state, const at::Tensor& gradient, const at::Tensor& q,
                            const at::Tensor& k, const at::Tensor& v, const BlockResult& merged, bool causal,
                            double scale, const at::Tensor& documents) {
  const bool rotates = state.rotate == RotateMethod::AllToAll && state.ranks() > 1;
  const at::Tensor own = at::cat({k, v}, -1);
  const int64_t batch = own.size(0), width = k.size(-1);
  const auto options = own.options().dtype(merged.out.scalar_type());
  // AllGather: the gradients for all ranks, reduced at the end. AllToAll: those for the keys that are here. They travel
  // behind their keys, and one rank further at the end.
  std::vector<int64_t> all_sizes = own.sizes().vec();
  all_sizes[0] *= state.ranks();
  const at::Tensor for_all = rotates ? at::Tensor() : at::empty(all_sizes, options);
  at::Tensor dq, arriving;
  for_each_rank(state, own, [&](int64_t other, const at::Tensor& kv) {
    at::Tensor dkv = rotates ? at::empty(own.sizes(), options) : for_all.narrow(0, other * batch, batch);
    const RingBlock block = block_with(state, other, q.size(-2), causal, documents);
    if (block.empty) {
      dkv.zero_();
    } else {
      const int64_t begin = block.query_begin;
      const at::Tensor keys = first(kv.narrow(-1, 0, width), block.keys);
      const at::Tensor values = first(kv.narrow(-1, width, v.size(-1)), block.keys);
      const BlockResult part{from(merged.out, begin), from(merged.lse.unsqueeze(-1), begin).squeeze(-1)};
      const BlockGradients found =
          block_attention_backward(from(gradient, begin), from(q, begin), keys, values, part, block.mask, scale);
      if (!dq.defined())  // the first block is that of the own keys, with all queries
        dq = found.q.to(options.dtype());
      else
        from(dq, begin).add_(found.q);
      write_gradients(dkv, found, block);
    }
    if (!rotates) return;
    if (arriving.defined()) {
      funcol::wait(arriving, state.group);
      dkv.add_(arriving.view(dkv.sizes()));
    }
    arriving = start_rotation(dkv, state.group);
  });
  if (rotates) {
    funcol::wait(arriving, state.group);
    return {dq, arriving.view(own.sizes())};
  }
  if (state.ranks() == 1) return {dq, for_all};
  const at::Tensor sum =
      funcol::reduce_scatter(for_all, 0, std::vector<int64_t>(state.ranks(), batch), ReduceOp::Sum, state.group);
  funcol::wait(sum, state.group);
  return {dq, sum};
}

struct RingAttentionBackward final : torch::autograd::Node {
  StatePtr state;
  bool causal = false;
  double scale = 0;
  SavedVariable q, k, v, out, lse, documents;

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(3);
    const at::NoGradGuard no_grad;
    const at::Tensor query = q.unpack(), key = k.unpack(), value = v.unpack();
    const RingGradients found = ring_backward(*state, gradients[0], query, key, value, {out.unpack(), lse.unpack()},
                                              causal, scale, documents.unpack());
    return {found.q.to(query.scalar_type()), found.kv.narrow(-1, 0, key.size(-1)).to(key.scalar_type()),
            found.kv.narrow(-1, key.size(-1), value.size(-1)).to(value.scalar_type())};
  }
  void release_variables() override {
    for (auto* saved : {&q, &k, &v, &out, &lse, &documents}) saved->reset_data();
  }
};

// Of gather_tokens_scatter_heads or gather_heads_scatter_tokens: the other one.
struct ExchangeBackward final : torch::autograd::Node {
  comm::Group group;
  bool scatter_heads = false;

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(1);
    return {scatter_heads ? gather_tokens_scatter_heads(group, gradients[0])
                          : gather_heads_scatter_tokens(group, gradients[0])};
  }
};

at::Tensor exchange(const comm::Group& group, const at::Tensor& x, bool scatter_heads) {
  const int64_t ranks = group->size(), heads = x.dim() - 3, tokens = x.dim() - 2;
  const int64_t split = scatter_heads ? heads : tokens, cat = scatter_heads ? tokens : heads;
  at::Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = funcol::all_to_all(x.contiguous(), split, std::vector<int64_t>(ranks, x.size(split) / ranks), cat,
                                std::vector<int64_t>(ranks, x.size(cat)), group);
    funcol::wait(result, group);
  }
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return result;
  auto node = libtorch::make_node<ExchangeBackward>();
  node->group = group;
  node->scatter_heads = !scatter_heads;
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  torch::autograd::set_history(result, node);
  return result;
}

}  // namespace

at::Tensor gather_tokens_scatter_heads(const comm::Group& group, const at::Tensor& x) {
  return exchange(group, x, true);
}
at::Tensor gather_heads_scatter_tokens(const comm::Group& group, const at::Tensor& x) {
  return exchange(group, x, false);
}

at::Tensor ring_attention(const StatePtr& state, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          bool causal, double scale) {
  BlockResult merged;
  at::Tensor result, documents;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    documents = all_documents(*state);
    merged = ring_forward(*state, q, k, v, causal, scale, documents);
    result = merged.out.scalar_type() == q.scalar_type() ? merged.out.detach() : merged.out.to(q.scalar_type());
  }
  if (!at::GradMode::is_enabled() || !(q.requires_grad() || k.requires_grad() || v.requires_grad())) return result;
  auto node = libtorch::make_node<RingAttentionBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(q, k, v));
  node->state = state;
  node->causal = causal;
  node->scale = scale;
  node->q = SavedVariable(q, false);
  node->k = SavedVariable(k, false);
  node->v = SavedVariable(v, false);
  node->out = SavedVariable(merged.out, false);
  node->lse = SavedVariable(merged.lse, false);
  node->documents = SavedVariable(documents, false);
  torch::autograd::set_history(result, node);
  return result;
}

}  // namespace tessera
