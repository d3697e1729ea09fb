// Compiled steps on a GPU: from the third call on they are replayed as a CUDA graph, which has fixed addresses and
// numbers. Whatever changes between calls must reach it.
#include "tessera/compile/api/compile.h"
#include "tessera/optim/sgd.h"
#include "tests/fixtures/ddp.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

constexpr int kCalls = 8;  // the graph is captured on the third

class CompiledOnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device on this machine, or a build without CUDA";
    torch::manual_seed(3);
  }
};

torch::nn::Sequential small_net() {
  torch::nn::Sequential net(torch::nn::Linear(16, 32), torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})),
                            torch::nn::GELU(), torch::nn::Linear(32, 8));
  net->to(at::kCUDA);
  return net;
}

torch::nn::Sequential copy_of(const torch::nn::Sequential& net) {
  auto copy = small_net();
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < net->parameters().size(); i++) copy->parameters()[i].copy_(net->parameters()[i]);
  return copy;
}

at::Tensor loss_and_gradients(torch::nn::Sequential& net, const at::Tensor& x) {
  net->zero_grad();
  auto loss = net->forward(x).pow(2).mean();
  loss.backward();
  return loss.detach();
}

void descend(torch::nn::Sequential& net) {
  const torch::NoGradGuard no_grad;
  for (auto& p : net->parameters()) p.sub_(p.grad(), 0.1);
}

void expect_graphs(const compiler::Executable& executable) {
  EXPECT_EQ(executable.why_no_graph(), "");
  EXPECT_TRUE(executable.copies_arguments()) << "no graph was captured";
}

void expect_equal_training(const std::function<at::Tensor(int call, const at::Tensor& last)>& input) {
  auto plain = small_net(), net = copy_of(plain);
  auto step = compile([](torch::nn::Sequential& net, const at::Tensor& x) { return loss_and_gradients(net, x); });
  std::vector<at::Tensor> expected, found;
  at::Tensor last;
  for (int call = 0; call < kCalls; call++) {
    last = input(call, last);
    expected.push_back(loss_and_gradients(plain, last));
    found.push_back(step(net, last));
    descend(plain);
    descend(net);
  }
  expect_graphs(step.executable());
  EXPECT_EQ(step.executable().calls_outside_graphs(), 0);
  for (size_t i = 0; i < expected.size(); i++)
    EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-5, 1e-6)) << "call " << i << ": " << found[i] << expected[i];
}

// A norm of a residual sum, as in Llama.
TEST_F(CompiledOnCuda, ComputesRmsNormTogetherWithItsSum) {
  const auto options = at::device(at::kCUDA).dtype(at::kBFloat16).requires_grad(true);
  std::vector<at::Tensor> in = {torch::randn({40, 256}, options), torch::randn({40, 256}, options),
                                torch::randn({256}, options)};
  const auto f = [](std::vector<at::Tensor>& in) {
    for (auto& t : in) t.mutable_grad().reset();
    const auto sum = in[0] + in[1];
    const auto y = at::rms_norm(sum, {256}, in[2], 1e-5) + sum;
    (y * y).sum().backward();
    return y.detach();
  };
  const auto y = f(in);
  std::vector<at::Tensor> expected;
  for (const auto& t : in) expected.push_back(t.grad());
  auto step = compile(f);
  EXPECT_TRUE(at::allclose(step(in), y, 2e-2, 2e-2));
  for (size_t i = 0; i < in.size(); i++) EXPECT_TRUE(at::allclose(in[i].grad(), expected[i], 2e-2, 5e-1)) << i;
  const auto listing = step.listing();
  EXPECT_NE(listing.find("\"add_rms_norm\""), std::string::npos) << listing;
  EXPECT_NE(listing.find("\"rms_norm_backward_add\""), std::string::npos) << listing;
}

TEST_F(CompiledOnCuda, TakesNewArguments) {
  expect_equal_training([](int, const at::Tensor&) { return torch::randn({4, 16}, at::kCUDA); });
}

TEST_F(CompiledOnCuda, SeesWritesToTheSameArgument) {
  expect_equal_training([](int call, const at::Tensor& last) {
    return call == 0 ? torch::randn({4, 16}, at::kCUDA) : last.normal_();
  });
}

TEST_F(CompiledOnCuda, TakesPartsOfALargeTensor) {
  const auto all = torch::randn({kCalls, 4, 16}, at::kCUDA);
  expect_equal_training([&](int call, const at::Tensor&) { return all[call]; });
}

TEST_F(CompiledOnCuda, SeesParametersThatMove) {
  auto plain = small_net(), net = copy_of(plain);
  auto step = compile([](torch::nn::Sequential& net, const at::Tensor& x) { return loss_and_gradients(net, x); });
  const auto x = torch::randn({4, 16}, at::kCUDA);
  for (int call = 0; call < 3 * kCalls; call++) {
    const auto expected = loss_and_gradients(plain, x);
    EXPECT_TRUE(at::allclose(step(net, x), expected, 1e-5, 1e-6)) << "call " << call;
    descend(plain);
    descend(net);
    if (call % 5 == 4)
      for (auto& p : net->parameters()) p.set_data(p.detach().clone());
  }
}

TEST_F(CompiledOnCuda, AReturnedValueKeepsItsMemory) {
  auto net = small_net();
  auto step = compile([](torch::nn::Sequential& net, const at::Tensor& x) { return net->forward(x).detach(); });
  std::vector<at::Tensor> results, copies;
  for (int call = 0; call < kCalls; call++) {
    results.push_back(step(net, torch::randn({4, 16}, at::kCUDA)));
    copies.push_back(results.back().clone());
  }
  for (size_t i = 0; i < results.size(); i++) EXPECT_TRUE(at::equal(results[i], copies[i])) << "call " << i;
  EXPECT_FALSE(at::equal(results[kCalls - 1], results[kCalls - 2]));
}

TEST_F(CompiledOnCuda, DropoutDrawsAnewInEveryCall) {
  auto step = compile([](const at::Tensor& x) { return at::dropout(x * 2, 0.5, true); });
  const auto x = torch::ones({4096}, at::kCUDA);
  at::Tensor last;
  for (int call = 0; call < kCalls; call++) {
    const auto now = step(x);
    EXPECT_FALSE(last.defined() && at::equal(now, last)) << "call " << call;
    last = now;
  }
}

TEST_F(CompiledOnCuda, TheLearningRateIsLive) {
  auto plain = small_net(), net = copy_of(plain);
  optim::SGD plain_optimizer(plain->parameters(), {.lr = 0.1}), optimizer(net->parameters(), {.lr = 0.1});
  auto step = compile([&](torch::nn::Sequential& net, optim::SGD& optimizer, const at::Tensor& x) {
    auto loss = loss_and_gradients(net, x);
    optimizer.step();
    return loss;
  });
  for (int call = 0; call < kCalls; call++) {
    const auto x = torch::randn({4, 16}, at::kCUDA);
    for (auto* each : {&plain_optimizer, &optimizer}) each->set_lr(0, 0.1 / (call + 1));
    const auto expected = loss_and_gradients(plain, x);
    plain_optimizer.step();
    EXPECT_TRUE(at::allclose(step(net, optimizer, x), expected, 1e-5, 1e-6)) << "call " << call;
  }
  expect_graphs(step.executable());
  EXPECT_GT(step.executable().calls_outside_graphs(), 0);  // the optimizer, which takes the learning rate
  EXPECT_NE(step.listing().find("in no CUDA graph: it takes a number"), std::string::npos) << step.listing();
}

// Results of calls between graphs: the graphs after them read the same memory in every run.
TEST_F(CompiledOnCuda, ReadsWhatCallsBetweenGraphsAllocate) {
  const auto f = [](const at::Tensor& x, double number) {
    const auto a = (x + 1).sin().cos();
    const auto b = a.masked_fill(a.gt(0.5), number);
    const auto [sorted, order] = (b + a).sin().cos().exp().sort();
    return (sorted * order).sum();
  };
  auto step = compile(f);
  for (int call = 0; call < kCalls; call++) {
    const auto x = torch::randn({300}, at::kCUDA);
    EXPECT_TRUE(at::allclose(step(x, call + 0.5), f(x, call + 0.5), 1e-5, 1e-6)) << "call " << call;
  }
  expect_graphs(step.executable());
  EXPECT_GT(step.executable().calls_outside_graphs(), 0);
}

// Two ranks share the GPU: their collectives run between graphs.
TEST_F(CompiledOnCuda, CollectivesRunBetweenGraphs) {
  using namespace fixtures;
  const auto start = mlp();
  run_ranks(2, [&](Rank& me) {
    const torch::Device device(at::kCUDA, 0);
    auto plain = clone(start, device);
    DistributedDataParallel ddp(clone(start, device), {.process_group = me.group()});
    auto step = compile([](DistributedDataParallel<MLP>& ddp, const at::Tensor& x) {
      ddp->zero_grad();
      auto loss = ddp(x).pow(2).mean();
      loss.backward();
      return loss.detach();
    });
    for (int call = 0; call < kCalls; call++) {
      auto data = batches(2, {4, 10}, call);
      for (auto& batch : data) batch = batch.to(device);
      zero_grad(*plain);
      accumulate_means(plain, data, square_loss);
      step(ddp, data[static_cast<size_t>(me.rank)]);
      EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain)), "") << "call " << call;
      const torch::NoGradGuard no_grad;
      for (const auto& p : plain->parameters()) p.sub_(p.grad(), 0.1);
      for (const auto& p : ddp->parameters()) p.sub_(p.grad(), 0.1);
    }
    expect_graphs(step.executable());
    EXPECT_GT(step.executable().calls_outside_graphs(), 0);
  });
}

}  // namespace
}  // namespace tessera
