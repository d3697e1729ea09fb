#pragma once
#include "benchmarks/harness/process_ranks.h"
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

// Train steps for the benchmarks of parallel training, and how they are timed.
namespace tessera::bench {

using Step = std::function<void()>;

// LibTorch's AdamW, or its fused kernel on all parameters at once.
enum class Optimizer { Torch, Fused };

// zero_grad, loss().backward(), AdamW.
Step train_step(Optimizer optimizer, const std::vector<at::Tensor>& parameters, std::function<at::Tensor()> loss);

// A separate generator. Ranks that are threads share the default one.
at::Generator generator(uint64_t seed);

// The median time per step of each function in milliseconds. The functions alternate. A repetition starts and ends with
// a barrier.
std::vector<double> medians_ms(const comm::Group& group, int64_t steps, const std::vector<Step>& functions);

// A case of the benchmarks ddp, fsdp and tp.
struct StepCase {
  const char* model;
  const char* variant;
  int64_t steps;  // per repetition
};

// Times both steps on all ranks. Rank 0 emits the row MODEL/RANKS/-/VARIANT. `note` is called on all ranks after the
// timing, with our step.
void emit_step_row(testing::Rank& me, const StepCase& step_case, const Step& ours, const Step& plain,
                   const EmitRow& emit, const std::function<std::string(const Step&)>& note = {});

}  // namespace tessera::bench
