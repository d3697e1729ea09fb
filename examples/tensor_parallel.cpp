// parallelize_module on a custom module: trains, and checks that the loss falls.
//   tessera run -n 4 -- ./example_tensor_parallel
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <iostream>

namespace ts = tessera;

struct FeedForwardImpl : torch::nn::Cloneable<FeedForwardImpl> {
  explicit FeedForwardImpl(int64_t d) : d(d) { reset(); }
  void reset() override {
    norm = register_module("norm", ts::nn::LayerNorm(torch::nn::LayerNormOptions({d})));
    up = register_module("up", ts::nn::Linear(d, 4 * d));
    down = register_module("down", ts::nn::Linear(4 * d, d));
  }
  torch::Tensor forward(torch::Tensor x) { return x + down(torch::gelu(up(norm(x)))); }

  int64_t d;
  ts::nn::LayerNorm norm{nullptr};
  ts::nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(FeedForward);  // instead of TORCH_MODULE(FeedForward)

int main() {
  ts::init();
  auto mesh = ts::init_device_mesh("cpu", {ts::get_world_size()}, {"tp"});
  ts::manual_seed(7);

  // Compare with the plain module first: it runs a small one of the same class, and throws if a value differs.
  const ts::Plan plan = {{"up", ts::ColwiseParallel()}, {"down", ts::RowwiseParallel()}};
  torch::manual_seed(7);  // the same values on every rank
  FeedForward small(8);
  ts::check_parallel(small, mesh, plan, ts::random::randn({2, 8}));

  // Create without memory, shard, then initialize the shards: no rank ever holds a full matrix. The values do not
  // depend on the number of ranks.
  auto model = ts::deferred_init([] { return FeedForward(32); });
  ts::parallelize_module(model, mesh, plan);
  ts::materialize(model);

  torch::Tensor x = ts::random::randn({16, 32}), y = ts::random::randn({16, 32});  // the same on every rank
  torch::optim::AdamW optimizer(model->parameters(), 1e-2);
  double first = 0, last = 0;
  for (int step = 0; step < 20; step++) {
    optimizer.zero_grad();
    auto loss = torch::mse_loss(ts::checkpoint(model, x), y);
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  if (mesh.get_rank() == 0)
    std::cout << "loss " << first << " to " << last << "\n"
              << ts::DTensor(model->up->weight) << "\n"  // DTensor(f32[128, 32][S(0)] on mesh(tp=4))
              << ts::state_dict(*model) << "\n";
  ts::destroy();
  return last < first / 2 ? 0 : 1;
}
