#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

// Random fills as registered ops (tessera::philox_*), so that a tracer, a debug mode and a profiler see them. The
// result depends only on the arguments; random.h counts the fills. They run on plain tensors: a local tensor, or a full
// one.
namespace tessera::random_ops {

// Selects the random values: fill number `offset` with key `seed`, at the global indices `ranges` of a tensor of global
// `sizes` (ranges as in local_indices.h; empty: all).
struct Draw {
  int64_t seed, offset;
  at::IntArrayRef sizes, ranges;
};

void uniform_(at::Tensor& local, double from, double to, const Draw& draw);
void normal_(at::Tensor& local, double mean, double std, const Draw& draw);
void log_normal_(at::Tensor& local, double mean, double std, const Draw& draw);
void exponential_(at::Tensor& local, double lambda, const Draw& draw);
void cauchy_(at::Tensor& local, double median, double sigma, const Draw& draw);
void geometric_(at::Tensor& local, double p, const Draw& draw);
void bernoulli_(at::Tensor& local, double p, const Draw& draw);
void bernoulli_(at::Tensor& local, const at::Tensor& p, const Draw& draw);  // p has the sizes of `local`
// from .. from + range - 1. `range` is unsigned, and 0 means 2^64.
void integers_(at::Tensor& local, int64_t from, int64_t range, const Draw& draw);
// Returns local * mask / (1 - p), and the mask.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& local, double p, const Draw& draw);

}  // namespace tessera::random_ops
