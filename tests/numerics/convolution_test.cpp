// A convolutional network has the same bits on every number of data-parallel ranks, eager and compiled.
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/virtual_shards.h"
#include "tessera/nn/modules.h"
#include "tessera/numerics/numerics.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace ts = tessera;

namespace {

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl()
      : first(register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)))),
        second(register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 6, 3).stride(2).groups(2)))),
        last(register_module("last", torch::nn::Linear(6, 5))) {
    int i = 0;
    const torch::NoGradGuard no_grad;
    for (auto& p : parameters()) p.copy_(torch::sin(torch::arange(p.numel()).view(p.sizes()) * 0.7 + i++) * 0.5);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = torch::max_pool2d(torch::relu(first(x)), 2);
    return last(torch::adaptive_avg_pool2d(torch::relu(second(y)), {1, 1}).flatten(1));
  }
  torch::nn::Conv2d first, second;
  torch::nn::Linear last;
};
TORCH_MODULE(ConvNet);

std::string bytes_after_training(ts::testing::Rank& me, bool compiles) {
  const auto mesh = me.mesh(c10::str("dp=", me.size()));
  ConvNet model;
  ts::optim::SGD optimizer(model->parameters(), {.lr = 1e-2, .momentum = 0.9});
  ts::VirtualShards shards(*model, mesh, 24, ts::VirtualShards::kAll);
  const auto images = torch::sin(torch::arange(48 * 81).view({48, 1, 9, 9}) * 0.37);
  const int64_t rows = 48 / me.size();
  const auto mine = images.narrow(0, me.rank * rows, rows);
  const auto step = [&shards](ConvNet& model, ts::optim::SGD& optimizer, const at::Tensor& mine) {
    optimizer.zero_grad();
    for (int64_t i = 0, passes = shards.local_count(); i < passes; i++) {
      model(shards.rows(mine, i)).square().sum().backward();
      shards.add_gradients();
    }
    shards.reduce_gradients();
    optimizer.step();
  };
  const ts::NumericsScope scope(ts::Numerics::Invariant);
  auto compiled = ts::compile(step, {.codegen = false, .captures = ts::Captures::None});
  for (int i = 0; i < 3; i++) compiles&& i > 0 ? compiled(model, optimizer, mine) : step(model, optimizer, mine);
  std::string bytes;
  for (const auto& p : model->parameters()) {
    const auto values = p.detach().contiguous();
    bytes.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }
  return bytes;
}

TEST(InvariantConvolution, ANetworkHasTheBitsOfOneRank) {
  std::string expected;
  ts::testing::run_ranks(1, [&](ts::testing::Rank& me) { expected = bytes_after_training(me, false); });
  for (const int64_t ranks : {1, 2, 3})
    for (const bool compiles : {false, true})
      ts::testing::run_ranks(ranks, [&](ts::testing::Rank& me) {
        EXPECT_TRUE(bytes_after_training(me, compiles) == expected) << ranks << " ranks, compiled " << compiles;
      });
}

TEST(InvariantConvolution, WhatIsNotCoveredIsRefused) {
  const ts::NumericsScope scope(ts::Numerics::Invariant);
  EXPECT_ERROR(ts::UsageError, torch::conv_transpose2d(torch::ones({1, 2, 3, 3}), torch::ones({2, 2, 2, 2})),
               "a transposed convolution");
  EXPECT_ERROR(ts::UsageError, torch::conv3d(torch::ones({1, 2, 3, 3, 3}), torch::ones({2, 2, 2, 2, 2})),
               "1-D and 2-D convolutions");
  EXPECT_ERROR(ts::UsageError, torch::batch_norm(torch::ones({4, 2}), {}, {}, {}, {}, true, 0.1, 1e-5, false),
               "batch_norm", "no kernel whose bits");
}

}  // namespace
