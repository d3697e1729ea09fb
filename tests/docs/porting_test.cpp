// Compiles and runs the blocks of docs/porting.md, on one rank.
#include "docs/temporary_folder.h"

#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <tessera/train.h>
#include <torch/torch.h>

#include <iostream>

namespace porting_page {

namespace ts = tessera;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width) { linear = register_module("linear", torch::nn::Linear(width, 1)); }
  at::Tensor forward(const at::Tensor& x) { return linear(x); }
  torch::nn::Linear linear{nullptr};
};

const auto train_step = [](auto& model, torch::optim::Optimizer& optimizer, const at::Tensor& x, const at::Tensor& y) {
  optimizer.zero_grad();
  auto loss = torch::mse_loss(model->forward(x), y);
  loss.backward();
  optimizer.step();
  return loss;
};

auto make_dataset() {
  return torch::data::datasets::TensorDataset(torch::ones({256, 64}))
      .map(torch::data::transforms::Stack<torch::data::TensorExample>());
}

namespace plain {
TORCH_MODULE(Net);
void step_1(const at::Tensor& loss) {
  auto dataset = make_dataset();
#include "porting_1.inc"
  EXPECT_EQ(mean, 2);
}
}  // namespace plain

namespace sharded {
void steps_2_and_3() {
  const TemporaryFolder temporary;
  const std::string folder = "checkpoints";
  ts::init();
  const auto x = torch::ones({4, 64});
  auto y = torch::ones({4, 1});
  auto loader = ts::data::make_data_loader(make_dataset(), 64);
  const int64_t steps = 200;
#include "porting_2.inc"
  EXPECT_EQ(ts::dcp::steps_in(folder).size(), 2u);
#include "porting_3.inc"
  EXPECT_TRUE(loss.defined());
  const auto loss_now = [&] {
    const torch::NoGradGuard no_grad;
    return torch::mse_loss(model->forward(x), y).item<double>();
  };
  y.fill_(3);  // the model has learned the values before
  const auto before = loss_now();
#include "porting_4.inc"
  EXPECT_LT(loss_now(), before);
  ts::destroy();
}
}  // namespace sharded

TEST(PortingPage, Step1) { plain::step_1(torch::full({}, 2.0)); }
TEST(PortingPage, Steps2And3) { sharded::steps_2_and_3(); }

}  // namespace porting_page
