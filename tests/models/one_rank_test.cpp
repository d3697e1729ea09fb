// On a mesh of one rank, a train step through each parallelism runs the kernels of the plain step: nothing is copied,
// reduced or masked. Compiled, it is the program of the plain step.
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/models/sizes.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/ranks.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <sstream>
#include <string>

namespace tessera::models {
namespace {

using testing::Rank;
using testing::run_ranks;

using KernelCounts = std::map<std::string, int>;

// Counts the ops on local tensors, without views and allocations.
struct CountKernels final : OpMode {
  KernelCounts counts;

  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override {
    const auto& schema = op.schema();
    const auto distributed = [](const c10::IValue& v) {
      if (v.isTensor()) return is_dtensor(v.toTensor());
      return v.isTensorList() && !v.toTensorList().empty() && is_dtensor(v.toTensorList().get(0));
    };
    const auto args = torch::jit::last(*stack, schema.arguments().size());
    const bool is_local = std::none_of(args.begin(), args.end(), distributed);
    const bool is_view =
        !schema.returns().empty() && schema.returns()[0].alias_info() && !schema.returns()[0].alias_info()->isWrite();
    const bool allocates = schema.name().starts_with("aten::empty") || schema.name().starts_with("aten::new_empty");
    if (is_local && !is_view && !allocates) counts[c10::toString(schema.operator_name())]++;
    next(op, keys, stack);
  }
};

// Autograd adds a second gradient in place if the first is a plain tensor that nothing else refers to, else to new
// memory.
KernelCounts with_one_kind_of_add(KernelCounts counts) {
  counts["aten::add_.Tensor"] += counts["aten::add.Tensor"];
  counts.erase("aten::add.Tensor");
  return counts;
}

const auto forward_backward = [](auto& model, const at::Tensor& tokens, const at::Tensor& targets) {
  model->zero_grad();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const auto value = loss(model(tokens), targets);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  value.backward();
  return value.detach();
};

at::Tensor some_tokens() { return torch::randint(64, {2, 8}, torch::kLong); }

// The kernels of the second step, when gradients and optimizer state have existed once.
template <class H>
KernelCounts kernels_of_step(H model, bool loss_parallel = false) {
  optim::AdamW optimizer(model->parameters(), {.fused = true});
  CountKernels mode;
  for (int step = 0; step < 2; step++) {
    mode.counts.clear();
    const OpModeScope counting(mode);
    std::optional<LossParallel> scope;
    if (loss_parallel) scope.emplace();
    forward_backward(model, some_tokens(), some_tokens());
    optim::clip_grad_norm_(optimizer.parameters(), 1.0);
    optimizer.step();
  }
  return with_one_kind_of_add(mode.counts);
}

// The ops of the compiled forward and backward.
template <class H>
KernelCounts compiled_kernels(H model) {
  auto step = compile(forward_backward, {.codegen = false, .captures = Captures::None});
  step(model, some_tokens(), some_tokens());
  KernelCounts counts;
  std::istringstream lines(step.listing());
  for (std::string line; std::getline(lines, line);) {
    const auto begin = line.find(" = "), end = line.find('(', begin);
    if (begin == std::string::npos || end == std::string::npos) continue;
    auto name = line.substr(begin + 3, end - begin - 3);
    if (const auto dot = name.find('.'); dot != std::string::npos) name.replace(dot, 1, "::");
    counts[name]++;
  }
  return with_one_kind_of_add(counts);
}

GPT2 small_gpt2() {
  torch::manual_seed(7);
  return GPT2(GPT2Config{.vocab_size = 64, .max_seq_len = 16, .n_layer = 2, .n_head = 2, .n_embd = 16});
}

// "add 2 (plain 0)" for each kernel whose counts differ.
std::string difference(const KernelCounts& ours, const KernelCounts& plain) {
  std::string text;
  auto all = ours;
  all.insert(plain.begin(), plain.end());
  for (const auto& [name, count] : all) {
    const auto of = [&](const KernelCounts& counts) { return counts.contains(name) ? counts.at(name) : 0; };
    if (of(ours) != of(plain)) text += c10::str(name, " ", of(ours), " (plain ", of(plain), "); ");
  }
  return text;
}

TEST(OneRank, FullyShardRunsTheKernelsOfThePlainStep) {
  run_ranks(1, [&](Rank& me) {
    const auto plain = kernels_of_step(small_gpt2());
    auto model = small_gpt2();
    for (auto& block : model->h) fully_shard(block, {.mesh = me.mesh("dp=1")});
    fully_shard(model, {.mesh = me.mesh("dp=1")});
    EXPECT_EQ(difference(kernels_of_step(model), plain), "");
  });
}

TEST(OneRank, DistributedDataParallelRunsTheKernelsOfThePlainStep) {
  run_ranks(1, [&](Rank&) {
    const auto plain = kernels_of_step(small_gpt2());
    for (const bool view : {false, true})
      EXPECT_EQ(
          difference(kernels_of_step(DistributedDataParallel(small_gpt2(), {.gradient_as_bucket_view = view})), plain),
          "");
  });
}

TEST(OneRank, TensorParallelRunsTheKernelsOfThePlainStep) {
  run_ranks(1, [&](Rank& me) {
    const auto plain = kernels_of_step(small_gpt2());
    for (const bool sequence : {false, true})
      for (const bool loss_parallel : {false, true}) {
        auto model = small_gpt2();
        parallelize_module(
            model, me.mesh("tp=1"),
            tensor_parallel_plan(model->config, {.sequence_parallel = sequence, .loss_parallel = loss_parallel}));
        EXPECT_EQ(difference(kernels_of_step(model, loss_parallel), plain), "") << sequence << loss_parallel;
      }
  });
}

TEST(OneRank, CompiledStepsAreThePlainProgram) {
  run_ranks(1, [&](Rank& me) {
    const auto mesh = me.mesh("one=1");
    const auto plain = compiled_kernels(small_gpt2());
    EXPECT_GT(plain.size(), 10u);
    EXPECT_EQ(difference(compiled_kernels(DistributedDataParallel(small_gpt2())), plain), "");
    auto sharded = small_gpt2(), parallel = small_gpt2();
    for (auto& block : sharded->h) fully_shard(block, {.mesh = mesh});
    fully_shard(sharded, {.mesh = mesh});
    EXPECT_EQ(difference(compiled_kernels(sharded), plain), "");
    parallelize_module(parallel, mesh, tensor_parallel_plan(parallel->config));
    EXPECT_EQ(difference(compiled_kernels(parallel), plain), "");
  });
}

}  // namespace
}  // namespace tessera::models
