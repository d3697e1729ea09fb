#include "tessera/pipelining/detail/split_backward.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::pipelining {
namespace {

// A stage with a residual, a layer norm, a parameter that is used twice, an unused one and one far from the input.
struct Stage : torch::nn::Module {
  Stage() {
    const auto options = torch::kDouble;
    for (const char* name : {"w1", "w2", "tied", "unused", "gate"})
      weights.push_back(register_parameter(name, torch::randn({6, 6}, options)));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    norm->to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor h = torch::gelu(x.mm(weights[0]).mm(weights[2]));
    return norm(h.mm(weights[1]) + x).mm(weights[2].t()) * torch::sigmoid(weights[4].sum(0));
  }
  std::vector<torch::Tensor> weights;
  torch::nn::LayerNorm norm = nullptr;
};

TEST(SplitBackward, EqualsBackward) {
  torch::manual_seed(3);
  for (const bool input_requires_grad : {true, false}) {
    Stage stage;
    const torch::Tensor x = torch::randn({4, 6}, torch::kDouble).requires_grad_(input_requires_grad);
    const torch::Tensor gradient = torch::randn({4, 6}, torch::kDouble);
    stage.forward(x).backward(gradient);
    std::vector<torch::Tensor> expected;
    for (const torch::Tensor& parameter : stage.parameters())
      expected.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::Tensor());
    const torch::Tensor expected_input = x.grad();
    x.mutable_grad() = torch::Tensor();
    stage.zero_grad();

    for (int microbatch = 0; microbatch < 2; ++microbatch) {
      WeightBackward weights;
      const std::vector<torch::Tensor> inputs =
          backward_input({stage.forward(x)}, {gradient}, {x}, stage.parameters(), weights);
      for (const torch::Tensor& parameter : stage.parameters())
        EXPECT_TRUE(microbatch > 0 || !parameter.grad().defined()) << "computed with the inputs";
      EXPECT_EQ(inputs[0].defined(), input_requires_grad);
      EXPECT_TRUE(!input_requires_grad || inputs[0].allclose(expected_input, 1e-12, 1e-12));
      weights.run();
      weights.run();  // nothing is left
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      const torch::Tensor found = stage.parameters()[i].grad();
      ASSERT_EQ(found.defined(), expected[i].defined());
      EXPECT_TRUE(!found.defined() || found.allclose(2 * expected[i], 1e-12, 1e-12)) << i;
    }
  }
}

}  // namespace
}  // namespace tessera::pipelining
