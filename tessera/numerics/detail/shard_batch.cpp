#include "tessera/numerics/detail/shard_batch.h"

#include "tessera/base/error.h"
#include "tessera/tracing/detail/invariant_scope.h"

#include <torch/csrc/autograd/custom_function.h>

namespace tessera::numerics {
namespace {

// The identity. Backward keeps the gradient for VirtualShards and returns none.
struct SeparateUse : torch::autograd::Function<SeparateUse> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& weight) {
    ctx->saved_data["weight"] = static_cast<int64_t>(reinterpret_cast<intptr_t>(weight.unsafeGetTensorImpl()));
    return weight.view_as(weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& gradients) {
    auto* batch = open_shard_batch();
    TESSERA_CHECK(batch, UsageError,
                  "VirtualShards: backward of a tied weight after its pass; call add_gradients() after backward()");
    const auto* weight = reinterpret_cast<const void*>(static_cast<intptr_t>(ctx->saved_data["weight"].toInt()));
    batch->separate.push_back({weight, gradients[0]});
    return {at::Tensor()};
  }
};

}  // namespace

ShardBatch*& open_shard_batch() {
  static thread_local ShardBatch* batch = nullptr;
  return batch;
}

Terms terms_of_next_sum(const char* op, int64_t n) {
  auto* batch = open_shard_batch();
  if (!batch) return all_terms(n);
  batch->recorded.push_back({op, n});
  if (!batch->at_once()) return all_terms(n);
  const auto index = batch->recorded.size() - 1, expected = batch->known->size();
  const int64_t shards = batch->shards.end - batch->shards.begin;
  TESSERA_CHECK(index < expected, UsageError, "VirtualShards: sum ", index, " of ", shards, " virtual shards at once (",
                op, " over ", n, " terms) is not in the step of one, which has ", expected,
                "; compute one virtual shard at a time");
  const auto& one = (*batch->known)[index];
  TESSERA_CHECK(one.op == op && (n == one.terms || n == one.terms * shards), UsageError, "VirtualShards: sum ", index,
                " of ", shards, " virtual shards at once is ", op, " over ", n, " terms, and that of one is ", one.op,
                " over ", one.terms, "; compute one virtual shard at a time");
  if (n == one.terms) return all_terms(n);
  return {n, {0, n}, batch->shards, batch->count};
}

at::Tensor separate_use(const at::Tensor& weight) {
  if (!invariant_scope_is_open() || !open_shard_batch() || !weight.requires_grad()) return weight;
  return SeparateUse::apply(weight);
}

}  // namespace tessera::numerics
