// DistributedDataParallel in an existing LibTorch program. The new lines are marked; the model does not change.
//   tessera run -n 4 -- ./example_data_parallel
#include <tessera/tessera.h>  // new
#include <torch/torch.h>

#include <iostream>

namespace ts = tessera;

struct NetImpl : torch::nn::Module {
  torch::nn::Linear one{nullptr}, two{nullptr};
  NetImpl() {
    one = register_module("one", torch::nn::Linear(32, 64));
    two = register_module("two", torch::nn::Linear(64, 1));
  }
  torch::Tensor forward(torch::Tensor x) { return two(torch::tanh(one(x))); }
};
TORCH_MODULE(Net);

int main() {
  ts::init();                          // new
  torch::manual_seed(ts::get_rank());  // each rank has its own batches
  Net net;
  ts::DistributedDataParallel ddp(net);  // new: broadcasts weights, averages gradients
  torch::optim::SGD optimizer(ddp->parameters(), 0.05);

  double first = 0, last = 0;
  for (int step = 0; step < 100; step++) {
    auto x = torch::randn({16, 32});
    optimizer.zero_grad();
    auto loss = torch::mse_loss(ddp(x), x.slice(1, 0, 4).sum(1, /*keepdim=*/true));
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  // The ranks have seen different batches, but their weights are equal.
  auto sum = net->one->weight.detach().sum(), max = sum.clone();
  ts::all_reduce(max, ts::ReduceOp::Max);
  const bool equal = sum.item<double>() == max.item<double>();
  if (ts::get_rank() == 0)
    std::cout << ts::get_world_size() << " ranks, " << (equal ? "equal" : "different") << " weights, loss "
              << (last < first / 2 ? "fell" : "did not fall") << "\n";
  ts::destroy();
  return equal && last < first / 2 ? 0 : 1;
}
