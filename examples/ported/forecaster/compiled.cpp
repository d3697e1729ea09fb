// fully_shard.cpp with a compiled step.
//   tessera run -n 4 -- forecaster_compiled FOLDER [STEPS]
#include <tessera/train.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <string>

namespace ts = tessera;

// Sums of two waves, with the frequencies and phases of a generator that depends on the number of the series only.
struct Waves : torch::data::datasets::Dataset<Waves> {
  torch::data::Example<> get(size_t index) override {
    const auto i = static_cast<double>(index);
    auto t = torch::arange(33, torch::kFloat);
    auto wave = torch::sin(t * (0.1 + 0.013 * std::fmod(i * 7, 20)) + i) + 0.5 * torch::cos(t * 0.3 + i * 0.7);
    return {wave.slice(0, 0, 32).unsqueeze(1), wave.slice(0, 32, 33)};
  }
  torch::optional<size_t> size() const override { return 200; }
};

struct ForecasterImpl : torch::nn::Module {
  explicit ForecasterImpl(int64_t width) {
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(1, width).num_layers(2).batch_first(true)));
    attention = register_module("attention", torch::nn::MultiheadAttention(width, 4));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    head = register_module("head", torch::nn::Linear(width, 1));
  }
  torch::Tensor forward(torch::Tensor x) {
    auto states = std::get<0>(lstm(x)).transpose(0, 1);  // (time, batch, width)
    auto last = states.slice(0, -1);
    auto mixed = std::get<0>(attention(last, states, states));
    return head(norm((last + mixed).squeeze(0)));
  }
  torch::nn::LSTM lstm{nullptr};
  torch::nn::MultiheadAttention attention{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TESSERA_MODULE(Forecaster);

torch::Tensor train_step(Forecaster& model, torch::optim::Optimizer& optimizer, torch::Tensor x, torch::Tensor y) {
  optimizer.zero_grad();
  auto loss = torch::mse_loss(model(x), y);
  loss.backward();
  optimizer.step();
  return loss;
}

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".";
  const int64_t steps = argc > 2 ? std::stoll(argv[2]) : 40;
  ts::init();
  torch::manual_seed(1);
  Forecaster model(32);
  ts::fully_shard(model);
  auto loader = ts::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Waves().map(torch::data::transforms::Stack<>()), 16);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(3e-3));
  auto compiled_step = ts::compile(train_step);
  torch::optim::StepLR scheduler(optimizer, 10, 0.9);
  std::ofstream log(ts::get_rank() == 0 ? folder + "/losses.txt" : "/dev/null", std::ios::app);
  log.precision(17);
  ts::TrainingState state{model, optimizer, scheduler, loader};
  state.load(folder);
  int64_t& step = state.step;
  while (step < steps) {
    for (auto& batch : *loader) {
      if (step == steps) break;
      auto loss = compiled_step(model, optimizer, batch.data, batch.target);
      scheduler.step();
      log << step++ << " " << ts::mean_over_ranks(loss).item<double>() << std::endl;
      if (step % 5 == 0) state.save(folder);
    }
  }
  ts::destroy();
  return 0;
}
