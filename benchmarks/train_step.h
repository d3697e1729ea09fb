#pragma once
#include "tessera/testing/ranks.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

// What the benches of parallel training share: a step, and several of them timed by turns on all ranks.
namespace tessera::benchmarks {

using Step = std::function<void()>;

// LibTorch's optimizer, parameter by parameter, or its fused kernel, which takes all of them at once.
enum class Optimizer { Torch, Fused };

// zero_grad, loss().backward(), AdamW.
Step train_step(Optimizer optimizer, const std::vector<at::Tensor>& parameters, std::function<at::Tensor()> loss);

at::Generator generator(uint64_t seed);  // of its own: the default one is shared by ranks that are threads

// By turns, all ranks at once: a repetition begins and ends with all of them. Milliseconds a step.
std::vector<double> medians_ms(const comm::Group& group, int64_t steps, const std::vector<Step>& functions);

// How the ranks of these benches run, and what their rows say about it.
inline constexpr const char* kRanksNote = "ranks are threads";
inline void on_ranks(int64_t ranks, const testing::Body& body) { testing::run_ranks(ranks, body); }

}  // namespace tessera::benchmarks
