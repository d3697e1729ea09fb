#include "tessera/base/error.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/comm_hook.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <random>

namespace tessera {
namespace {

// numpy.random.RandomState(seed).randint(1'000'000'000), from which PyTorch seeds Q: 30 bits, again if too large.
uint64_t next_seed(std::mt19937& random) {
  for (;;)
    if (const uint64_t bits = random() & 0x3FFFFFFF; bits < 1'000'000'000) return bits;
}

struct LowRank {
  at::Tensor matrix;  // (n, m), a view of the gradient
  at::Tensor p, q;    // (n, r), (m, r), views of the memory of all factors
};

bool is_worth_compressing(const at::Tensor& matrix, int64_t rank, double min_rate) {
  const auto n = matrix.size(0), m = matrix.size(1);
  return static_cast<double>((n + m) * rank) * min_rate < static_cast<double>(n * m);
}

void orthogonalize(const at::Tensor& matrix) { matrix.copy_(std::get<0>(at::linalg_qr(matrix))); }

void wait_for_sum(const at::Tensor& x, const comm::Group& group) { funcol::wait(x, group); }

}  // namespace

BucketResult powerSGD_hook(const std::shared_ptr<PowerSGDState>& state, GradBucket& bucket) {
  TESSERA_CHECK(state && state->matrix_approximation_rank >= 1 && state->min_compression_rate > 0, UsageError,
                "powerSGD_hook: matrix_approximation_rank must be at least 1 and min_compression_rate greater than 0");
  const auto group = state->process_group ? state->process_group : bucket.group();
  const auto ranks = static_cast<double>(group->size());
  const auto buffer = bucket.buffer();
  const bool compresses = state->iter >= state->start_powerSGD_iter;
  if (bucket.is_last()) state->iter++;
  if (!compresses) {
    comm::all_reduce_(buffer.div_(ranks), ReduceOp::Sum, group);
    return [buffer, group] {
      funcol::wait(buffer, group);
      return buffer;
    };
  }
  if (!state->random) state->random = std::make_shared<std::mt19937>(static_cast<uint32_t>(state->random_seed));
  if (state->memory.size() <= bucket.index()) state->memory.resize(bucket.index() + 1);
  auto& memory = state->memory[bucket.index()];
  if (memory.error.defined() && memory.error.sizes() != buffer.sizes()) memory = {};  // DDP has made new buckets

  at::Tensor before;
  if (state->use_error_feedback) {
    if (memory.error.defined()) buffer.add_(memory.error);
    before = buffer.clone();
  }
  std::vector<LowRank> compressed;
  std::vector<at::Tensor> rest;
  int64_t p_elements = 0, q_elements = 0;
  for (const auto& gradient : bucket.gradients()) {
    const auto matrix = gradient.dim() > 0 ? gradient.reshape({gradient.size(0), -1}) : gradient.view({1, 1});
    const auto rank = std::min({matrix.size(0), matrix.size(1), state->matrix_approximation_rank});
    if (!matrix.is_alias_of(gradient) || !is_worth_compressing(matrix, rank, state->min_compression_rate)) {
      rest.push_back(gradient);
      continue;
    }
    compressed.push_back({matrix, {}, {}});
    p_elements += matrix.size(0) * rank;
    q_elements += matrix.size(1) * rank;
  }
  const bool new_q = !state->warm_start || !memory.q.defined() || memory.q.numel() != q_elements;
  const auto all_p = at::empty({p_elements}, buffer.options());
  if (new_q) memory.q = at::empty({q_elements}, buffer.options());
  const auto all_q = memory.q;
  int64_t p_offset = 0, q_offset = 0;
  for (auto& [matrix, p, q] : compressed) {
    const auto rank = std::min({matrix.size(0), matrix.size(1), state->matrix_approximation_rank});
    p = all_p.narrow(0, p_offset, matrix.size(0) * rank).view({matrix.size(0), rank});
    q = all_q.narrow(0, q_offset, matrix.size(1) * rank).view({matrix.size(1), rank});
    p_offset += p.numel();
    q_offset += q.numel();
  }
  if (new_q && !compressed.empty()) {
    const auto generator =
        at::make_generator<at::CPUGeneratorImpl>(next_seed(*static_cast<std::mt19937*>(state->random.get())));
    for (const auto& one : compressed)
      one.q.copy_(at::randn(one.q.sizes(), generator, at::TensorOptions(one.q.scalar_type())));
  }
  for (const auto& [matrix, p, q] : compressed) {
    orthogonalize(q);
    p.copy_(at::matmul(matrix, q));
  }
  at::Tensor flat_rest;
  if (!rest.empty()) {
    std::vector<at::Tensor> flat;
    for (const auto& t : rest) flat.push_back(t.reshape({-1}));
    flat_rest = at::cat(flat);
    comm::all_reduce_(flat_rest, ReduceOp::Sum, group);
  }
  if (!compressed.empty()) comm::all_reduce_(all_p, ReduceOp::Sum, group);
  // The second collective needs the result of the first, so it starts at the end of backward.
  return [=, index = bucket.index()] {
    if (flat_rest.defined()) {
      wait_for_sum(flat_rest, group);
      flat_rest.div_(ranks);
      int64_t offset = 0;
      for (const auto& t : rest) {
        t.copy_(flat_rest.narrow(0, offset, t.numel()).view(t.sizes()));
        offset += t.numel();
      }
    }
    if (!compressed.empty()) {
      wait_for_sum(all_p, group);
      for (const auto& [matrix, p, q] : compressed) {
        orthogonalize(p);
        q.copy_(at::matmul(matrix.t(), p));
      }
      comm::all_reduce_(all_q, ReduceOp::Sum, group);
      wait_for_sum(all_q, group);
      all_q.div_(ranks);
      for (const auto& [matrix, p, q] : compressed) matrix.copy_(at::matmul(p, q.t()));
    }
    if (before.defined()) state->memory[index].error = before - buffer;
    return buffer;
  };
}

}  // namespace tessera
