// Compiles and runs the blocks of docs/weights.md.
#include "docs/temporary_folder.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <iostream>

namespace weights_page {

namespace ts = tessera;

TEST(WeightsPage, BlocksRun) {
  const TemporaryFolder folder;
  const auto weight = torch::ones({2, 2});
  ts::dcp::write_safetensors("model.safetensors", {{"transformer.weight", weight}, {"lm_head.weight", weight}});
  ts::testing::run_ranks(2, [&](ts::testing::Rank& me) {
    ts::nn::Linear model(2, 2);
    ts::optim::SGD optimizer(model->parameters(), {.lr = 0.1});
    const auto train_step = [](auto& model, auto& optimizer) {
      optimizer.zero_grad();
      model(torch::ones({1, 2})).sum().backward();
      optimizer.step();
    };
#include "weights_1.inc"
    EXPECT_EQ(report.missing, std::vector<std::string>{"bias"});
    EXPECT_TRUE(model->weight.equal(weight));
#include "weights_2.inc"
    EXPECT_EQ(ts::dcp::latest("out"), "out/step-4");
  });
}

}  // namespace weights_page
