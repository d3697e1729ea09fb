// compile() of a full train step: forward, backward, gradient all-reduce and optimizer. The first call traces it. Later
// calls run the compiled program with fused kernels. Checks that the losses are those of eager mode.
//   tessera run -n 4 -- ./example_compile_step
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cmath>
#include <iostream>

namespace ts = tessera;

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    up = register_module("up", ts::nn::Linear(32, 128));
    down = register_module("down", ts::nn::Linear(128, 32));
  }
  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(x))); }
  ts::nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(Net);

// The step. Model, optimizer and batch are arguments, so that the compiled program can take others.
auto make_step() {
  return [](Net& net, ts::optim::AdamW& optimizer, const torch::Tensor& x, const torch::Tensor& y) {
    optimizer.zero_grad();
    auto loss = (net(x) - y).pow(2).mean();
    loss.backward();  // includes the all-reduce of gradients
    ts::optim::clip_grad_norm_(optimizer.parameters(), 1.0);
    optimizer.step();
    return loss;
  };
}

template <class Step>
std::vector<double> train(Step step, const ts::DeviceMesh& mesh) {
  ts::manual_seed(7);
  auto net = ts::deferred_init([] { return Net(); });
  ts::materialize(net);
  ts::replicate(*net, {{.device_mesh = mesh}});
  ts::optim::AdamW optimizer(net->parameters(), {.lr = 1e-2});
  std::vector<double> losses;
  for (int i = 0; i < 10; i++) {
    auto x = torch::sin(torch::arange(16 * 32).view({16, 32}) * (1.0 + i + mesh.get_rank()));
    auto loss = step(net, optimizer, x, x.flip(1)).detach().clone();
    ts::all_reduce(loss, ts::ReduceOp::Avg);
    losses.push_back(loss.template item<double>());
  }
  return losses;
}

int main() {
  ts::init();
  auto mesh = ts::init_device_mesh("cpu", {ts::get_world_size()}, {"dp"});
  const auto eager = train(make_step(), mesh);
  auto compiled_step = ts::compile(make_step());
  const auto compiled = train(compiled_step, mesh);  // the copy shares the compiled programs

  bool same = true;
  for (size_t i = 0; i < eager.size(); i++) same &= std::abs(eager[i] - compiled[i]) <= 1e-5 * eager[i];
  const bool fell = compiled.back() < compiled.front();
  if (mesh.get_rank() == 0)
    std::cout << (same ? "same losses as eager" : "other losses than eager") << ", "
              << (fell ? "falling" : "not falling") << ": " << compiled.front() << " to " << compiled.back() << "\n"
              << compiled_step.listing().substr(0, 2000) << "\n...\n";
  ts::destroy();
  return same && fell ? 0 : 1;
}
