// fully_shard.cpp with a compiled step.
//   tessera run -n 4 -- mnist_compiled FOLDER [STEPS]
#include "digits.h"

#include <tessera/train.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <string>

namespace ts = tessera;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 10, 5)));
    conv2 = register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(10, 20, 5)));
    fc1 = register_module("fc1", torch::nn::Linear(320, 50));
    fc2 = register_module("fc2", torch::nn::Linear(50, 10));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(torch::max_pool2d(conv1(x), 2));
    x = torch::relu(torch::max_pool2d(conv2(x), 2));
    x = torch::relu(fc1(x.view({-1, 320})));
    return torch::log_softmax(fc2(x), 1);
  }
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TESSERA_MODULE(Net);

torch::Tensor train_step(Net& model, torch::optim::Optimizer& optimizer, torch::Tensor x, torch::Tensor y) {
  optimizer.zero_grad();
  auto loss = torch::nll_loss(model(x), y);
  loss.backward();
  optimizer.step();
  return loss;
}

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".";
  const int64_t steps = argc > 2 ? std::stoll(argv[2]) : 30;
  ts::init();
  torch::manual_seed(1);
  Net model;
  ts::fully_shard(model);
  auto loader = ts::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Digits(folder).map(torch::data::transforms::Normalize<>(0.1307, 0.3081)).map(torch::data::transforms::Stack<>()),
      torch::data::DataLoaderOptions(64).workers(1));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.5));
  auto compiled_step = ts::compile(train_step);
  std::ofstream log(ts::get_rank() == 0 ? folder + "/losses.txt" : "/dev/null", std::ios::app);
  log.precision(17);
  ts::TrainingState state{model, optimizer, loader};
  state.load(folder);
  int64_t& step = state.step;
  while (step < steps) {
    for (auto& batch : *loader) {
      if (step == steps) break;
      auto loss = compiled_step(model, optimizer, batch.data, batch.target);
      log << step++ << " " << ts::mean_over_ranks(loss).item<double>() << std::endl;
      if (step % 5 == 0) state.save(folder);
    }
  }
  ts::destroy();
  return 0;
}
