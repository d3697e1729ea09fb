// plain.cpp with fully_shard. It saves a checkpoint every five steps, and continues from the last one on any number of
// ranks.
//   tessera run -n 4 -- translator_fully_shard FOLDER [STEPS]
#include <tessera/train.h>
#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <string>

namespace ts = tessera;

constexpr int64_t kWords = 20, kLength = 8, kStart = 0;

// Source and target sentences. The words of a sentence depend on its number only.
struct Sentences : torch::data::datasets::Dataset<Sentences> {
  torch::data::Example<> get(size_t index) override {
    auto source = (torch::arange(kLength) * (1 + static_cast<int64_t>(index) % 7) + static_cast<int64_t>(index) * 3)
                      .remainder(kWords - 1) +
                  1;
    return {source, torch::cat({torch::full({1}, kStart), source.flip(0)})};
  }
  torch::optional<size_t> size() const override { return 300; }
};

struct TranslatorImpl : torch::nn::Module {
  explicit TranslatorImpl(int64_t width) {
    source_words = register_module("source_words", torch::nn::Embedding(kWords, width));
    target_words = register_module("target_words", torch::nn::Embedding(kWords, width));
    positions = register_module("positions", torch::nn::Embedding(kLength, width));
    transformer = register_module(
        "transformer",
        torch::nn::Transformer(torch::nn::TransformerOptions(width, 4, 2, 2).dim_feedforward(64).dropout(0)));
    head = register_module("head", torch::nn::Linear(width, kWords));
  }
  // source, target: (batch, length). Returns (batch, length, words).
  torch::Tensor forward(torch::Tensor source, torch::Tensor target) {
    auto place = positions(torch::arange(kLength)).unsqueeze(1);
    auto mask = torch::nn::TransformerImpl::generate_square_subsequent_mask(kLength);
    auto from = source_words(source.t()) + place, to = target_words(target.t()) + place;
    return head(transformer(from, to, torch::Tensor(), mask)).transpose(0, 1);
  }
  torch::nn::Embedding source_words{nullptr}, target_words{nullptr}, positions{nullptr};
  torch::nn::Transformer transformer{nullptr};
  torch::nn::Linear head{nullptr};
};
TESSERA_MODULE(Translator);

torch::Tensor train_step(Translator& model, torch::optim::Optimizer& optimizer, torch::Tensor source,
                         torch::Tensor target) {
  optimizer.zero_grad();
  auto logits = model(source, target.slice(1, 0, kLength));
  auto loss = torch::nn::functional::cross_entropy(logits.reshape({-1, kWords}), target.slice(1, 1).reshape({-1}));
  loss.backward();
  optimizer.step();
  return loss;
}

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".";
  const int64_t steps = argc > 2 ? std::stoll(argv[2]) : 30;
  ts::init();
  torch::manual_seed(1);
  Translator model(32);
  ts::fully_shard(model);
  auto loader = ts::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Sentences().map(torch::data::transforms::Stack<>()), 16);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(2e-3));
  torch::optim::StepLR scheduler(optimizer, 10, 0.8);
  std::ofstream log(ts::get_rank() == 0 ? folder + "/losses.txt" : "/dev/null", std::ios::app);
  log.precision(17);
  ts::TrainingState state{model, optimizer, scheduler, loader};
  state.load(folder);
  int64_t& step = state.step;
  while (step < steps) {
    for (auto& batch : *loader) {
      if (step == steps) break;
      auto loss = train_step(model, optimizer, batch.data, batch.target);
      scheduler.step();
      log << step++ << " " << ts::mean_over_ranks(loss).item<double>() << std::endl;
      if (step % 5 == 0) state.save(folder);
    }
  }
  ts::destroy();
  return 0;
}
