#pragma once
#include "tessera/comm/communicator.h"

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

}  // namespace tessera::benchmarks
