// A whole train step as one program: traced when it is first called, then run without autograd, dispatch or hooks, with
// loops of its own for what can be fused. Checks that it computes what the same step does without being compiled.
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

// The same text for both. What it is given it takes as arguments, so that a program can be given others.
auto step_of() {
  return [](Net& net, ts::optim::AdamW& optimizer, const torch::Tensor& x, const torch::Tensor& y) {
    optimizer.zero_grad();
    auto loss = (net(x) - y).pow(2).mean();
    loss.backward();  // with the reduction over ranks in it
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
  const auto plain = train(step_of(), mesh);
  auto compiled_step = ts::compile(step_of());
  const auto compiled = train(compiled_step, mesh);  // the copy shares the programs

  bool same = true;
  for (size_t i = 0; i < plain.size(); i++) same &= std::abs(plain[i] - compiled[i]) <= 1e-5 * plain[i];
  const bool fell = compiled.back() < compiled.front();
  if (mesh.get_rank() == 0)
    std::cout << (same ? "the same losses" : "other losses") << ", " << (fell ? "which fell" : "which did not fall")
              << ": " << compiled.front() << " to " << compiled.back() << "\n"
              << compiled_step.listing().substr(0, 2000) << "\n...\n";
  ts::destroy();
  return same && fell ? 0 : 1;
}
