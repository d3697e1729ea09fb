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

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct CustomProduct : torch::autograd::Function<CustomProduct> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& a, const torch::Tensor& b) {
    context->save_for_backward({a, b});
    return a.mm(b);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    return {context->needs_input_grad(0) ? gradients[0].mm(saved[1].t()) : torch::Tensor(),
            context->needs_input_grad(1) ? saved[0].t().mm(gradients[0]) : torch::Tensor()};
  }
};

// The graphs of PyTorch's test_backward.py that EqualsBackward does not have.
TEST(SplitBackward, GraphsOfPyTorchsTests) {
  torch::manual_seed(3);
  using Forward = std::function<torch::Tensor(const torch::Tensor& x, const torch::Tensor& w)>;
  const std::vector<std::pair<const char*, Forward>> graphs = {
      {"the output is a view", [](const auto& x, const auto& w) { return x.mm(w).relu().t(); }},
      {"an autograd function of the user", [](const auto& x, const auto& w) { return CustomProduct::apply(x, w); }},
      {"a node with two results",
       [](const auto& x, const auto& w) {
         const auto parts = x.mm(w).chunk(2, 1);
         return parts[0].sin().mm(parts[1].t());
       }},
      {"a node with two results, one of them unused",
       [](const auto& x, const auto& w) { return std::get<0>(x.mm(w).sort(1)).chunk(2, 1)[1].exp(); }},
      {"a weight twice", [](const auto& x, const auto& w) { return x.mm(w).relu().mm(w); }},
      {"a result of the weight alone", [](const auto& x, const auto& w) { return x * w.sin().sum(); }},
      {"the input does not matter", [](const auto& x, const auto& w) { return w * 2 + x.detach().sum(); }},
  };
  for (const auto& [name, forward] : graphs) {
    SCOPED_TRACE(name);
    const torch::Tensor w = torch::randn({6, 6}, torch::kDouble).requires_grad_();
    torch::Tensor expected_weight;
    for (int iteration = 0; iteration < 3; ++iteration) {
      const torch::Tensor x = torch::randn({6, 6}, torch::kDouble).requires_grad_();
      const torch::Tensor y = forward(x, w);
      const torch::Tensor gradient = torch::randn(y.sizes(), torch::kDouble);
      const auto expected = torch::autograd::grad({forward(x, w)}, {x, w}, {gradient}, false, false, true);
      expected_weight = expected_weight.defined() ? expected_weight + expected[1] : expected[1];
      WeightBackward weights;
      const auto found = backward_input({y}, {gradient}, {x}, {w}, weights);
      ASSERT_EQ(found[0].defined(), expected[0].defined());
      EXPECT_TRUE(!found[0].defined() || found[0].allclose(expected[0], 1e-12, 1e-12));
      weights.run();
      EXPECT_TRUE(w.grad().allclose(expected_weight, 1e-12, 1e-12)) << iteration;
    }
  }
}

}  // namespace
}  // namespace tessera::pipelining
