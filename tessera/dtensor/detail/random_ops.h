#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

// The random fills as registered ops (tessera::philox_*): what a tracer, a debug mode and a profiler see. Each is a
// function of its arguments alone; who counts the fills is random.h. Called on plain tensors: a rank's piece, or a
// whole.
namespace tessera::random_ops {

// Which numbers: fill number `offset` of the stream `seed`, at the global indices that a piece of a tensor of
// `sizes` holds (runs as in piece.h; empty: all).
struct Draw {
  int64_t seed, offset;
  at::IntArrayRef sizes, runs;
};

void uniform_(at::Tensor& piece, double from, double to, const Draw& draw);
void normal_(at::Tensor& piece, double mean, double std, const Draw& draw);
void log_normal_(at::Tensor& piece, double mean, double std, const Draw& draw);
void exponential_(at::Tensor& piece, double lambda, const Draw& draw);
void cauchy_(at::Tensor& piece, double median, double sigma, const Draw& draw);
void geometric_(at::Tensor& piece, double p, const Draw& draw);
void bernoulli_(at::Tensor& piece, double p, const Draw& draw);
void bernoulli_(at::Tensor& piece, const at::Tensor& p, const Draw& draw);  // p: like the piece
// from .. from + range - 1; range counts as unsigned, and 0 stands for 2^64.
void integers_(at::Tensor& piece, int64_t from, int64_t range, const Draw& draw);
// piece * mask / (1 - p), and the mask.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& piece, double p, const Draw& draw);

}  // namespace tessera::random_ops
