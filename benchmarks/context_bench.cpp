// Attention, forward and backward, with context parallelism on 1, 2 and 4 processes: causal, (1, 4 heads, 8192 tokens,
// 64), float, one thread per rank.
//
// attention: CPU milliseconds of all ranks together. `plain` is one rank's full attention.
// slowest:   the largest CPU time of a rank: the time of the attention where every rank has a core.
// memory:    bytes of the tensors that a rank keeps from forward to backward, in MB.
//
// Freed memory stays in the process (mallopt), here and in the peer, so that no variant pays for page faults.
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/process_ranks.h"
#include "tessera/tensor_parallel/context_parallel.h"

#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <malloc.h>

#include <algorithm>
#include <ctime>

namespace tessera::bench {
namespace context_bench {
namespace {

constexpr int64_t kHeads = 4, kTokens = 8192, kHeadDim = 64;

double process_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct ContextVariant {
  const char* name;
  ContextParallelOptions options;
};
std::vector<ContextVariant> variants() {
  return {{"all_gather", {}},
          {"all_to_all", {.rotate = RotateMethod::AllToAll}},
          {"unbalanced", {.load_balance = LoadBalance::None}},
          {"ulysses", {.method = ContextMethod::Ulysses}}};
}

struct AttentionCost {
  double total = 1e30, slowest = 1e30;  // CPU seconds; the best of several
  double kept = 0;                      // bytes
};

AttentionCost measure(testing::Rank& me, std::vector<at::Tensor> qkv) {
  AttentionCost cost;
  for (at::Tensor& x : qkv) x = x.detach().clone().requires_grad_();
  for (int i = 0; i < 6; ++i) {
    for (at::Tensor& x : qkv) x.mutable_grad() = at::Tensor();
    me.group()->barrier().wait();
    const double begin = process_seconds();
    const at::Tensor out = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, /*is_causal=*/true);
    out.sum().backward();
    at::Tensor total = at::zeros({1}, at::kDouble).fill_(process_seconds() - begin), slowest = total.clone();
    me.group()->all_reduce(total, ReduceOp::Sum).wait();
    me.group()->all_reduce(slowest, ReduceOp::Max).wait();
    cost.total = std::min(cost.total, total.item<double>());
    cost.slowest = std::min(cost.slowest, slowest.item<double>());
    cost.kept = static_cast<double>((qkv[0].nbytes() + qkv[1].nbytes() + qkv[2].nbytes() + out.nbytes()) +
                                    static_cast<size_t>(out.numel() / kHeadDim) * 4);  // and logsumexp
  }
  return cost;
}

void run(int64_t ranks, const EmitRow& emit) {
  run_process_ranks("context", ranks, emit, [&](testing::Rank& me, const EmitRow& emit) {
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    std::vector<at::Tensor> qkv;
    for (int i = 0; i < 3; ++i) qkv.push_back(at::randn({1, kHeads, kTokens, kHeadDim}));
    AttentionCost plain = measure(me, qkv);
    plain.total /= static_cast<double>(ranks);  // every rank computes the full attention
    for (const ContextVariant& variant : variants()) {
      const ContextParallel context(me.mesh({ranks}, {"cp"}), variant.options);
      std::vector<at::Tensor> mine;
      for (const at::Tensor& x : qkv) mine.push_back(context.shard(x, 2));
      const AttentionCost cost = measure(me, mine);
      const std::string suffix = c10::str('/', ranks, '/', kTokens, '/', variant.name);
      emit({.name = "attention" + suffix,
            .unit = "ms",
            .ours = cost.total * 1e3,
            .plain = plain.total * 1e3,
            .note = c10::str("ratio ", cost.total / plain.total)});
      emit({.name = "slowest" + suffix, .unit = "ms", .ours = cost.slowest * 1e3, .plain = plain.total * 1e3});
      emit({.name = "memory" + suffix, .unit = "MB", .ours = cost.kept / 1e6, .plain = plain.kept / 1e6});
    }
  });
}

}  // namespace
}  // namespace context_bench

void register_context(BenchRegistry& registry) {
  registry.add({"context", "attention with context parallelism", [](const EmitRow& emit) {
                  for (const int64_t ranks : {1, 2, 4}) context_bench::run(ranks, emit);
                }});
}

}  // namespace tessera::bench
