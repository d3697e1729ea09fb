#include "tessera/numerics/detail/shard_batch.h"

#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
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

NextSum next_sum(const char* op, int64_t n) {
  auto* batch = open_shard_batch();
  if (!batch) return {all_terms(n)};
  batch->recorded.push_back({op, n});
  const auto index = batch->recorded.size() - 1;
  const int64_t shards = batch->shards.end - batch->shards.begin;
  const auto known = [&](const std::vector<RecordedSum>& sums) -> const RecordedSum& {
    TESSERA_CHECK(index < sums.size() && sums[index].op == op, UsageError, "VirtualShards: sum ", index, " of ", shards,
                  " virtual shards at once (", op, " over ", n, " terms) is not in the step of one, which has ",
                  sums.size(), "; compute one virtual shard at a time");
    return sums[index];
  };
  int64_t of_one = n;  // terms of one virtual shard on this rank
  if (batch->at_once()) {
    const auto& one = known(*batch->known);
    TESSERA_CHECK(n == one.terms || n == one.terms * shards, UsageError, "VirtualShards: sum ", index, " of ", shards,
                  " virtual shards at once is ", op, " over ", n, " terms, and that of one is ", one.op, " over ",
                  one.terms, "; compute one virtual shard at a time");
    of_one = one.terms;
  }
  NextSum sum;
  int64_t terms = n;
  if (batch->of_full_rows) {
    const auto& full = known(*batch->of_full_rows);
    const int64_t ranks = batch->context->size();
    TESSERA_CHECK(full.terms == of_one || full.terms == of_one * ranks, UsageError, "VirtualShards: sum ", index, " (",
                  op, ") has ", of_one, " terms on a rank of context parallelism, and ", full.terms, " in full rows");
    if (full.terms != of_one) {
      sum.context = batch->context;
      sum.tokens = batch->tokens;
      terms = n * ranks;
    }
  }
  if (n == of_one)
    sum.terms = all_terms(terms);
  else
    sum.terms = {terms, {0, terms}, batch->shards, batch->count};
  return sum;
}

at::Tensor gather_tokens(const at::Tensor& x, int64_t dim, const NextSum& sum) {
  const std::vector<int64_t> sizes(static_cast<size_t>(sum.context->size()), sum.tokens);
  const auto rows = x.unflatten(dim, {x.size(dim) / sum.tokens, sum.tokens}).contiguous();
  auto all = funcol::all_gather(rows, dim + 1, sizes, sum.context);
  funcol::wait(all, sum.context);
  return all.flatten(dim, dim + 1);
}

at::Tensor separate_use(const at::Tensor& weight) {
  if (!invariant_scope_is_open() || !open_shard_batch() || !weight.requires_grad()) return weight;
  return SeparateUse::apply(weight);
}

}  // namespace tessera::numerics
