// DCGAN on small images, for one process: PyTorch's C++ example with less layers. The other files of this folder are
// the same program with DistributedDataParallel, with fully_shard and a checkpoint, and compiled.
//   dcgan_plain FOLDER [STEPS]
#include "../mnist/digits.h"

#include <torch/torch.h>

#include <fstream>
#include <iostream>
#include <string>

namespace nn = torch::nn;

constexpr int64_t kNoise = 32, kBatch = 32;

struct GeneratorImpl : nn::Module {
  GeneratorImpl() {
    using Options = nn::ConvTranspose2dOptions;
    conv1 = register_module("conv1", nn::ConvTranspose2d(Options(kNoise, 32, 4).bias(false)));
    norm1 = register_module("norm1", nn::BatchNorm2d(32));
    conv2 = register_module("conv2", nn::ConvTranspose2d(Options(32, 16, 3).stride(2).padding(1).bias(false)));
    norm2 = register_module("norm2", nn::BatchNorm2d(16));
    conv3 = register_module("conv3", nn::ConvTranspose2d(Options(16, 8, 4).stride(2).padding(1).bias(false)));
    norm3 = register_module("norm3", nn::BatchNorm2d(8));
    conv4 = register_module("conv4", nn::ConvTranspose2d(Options(8, 1, 4).stride(2).padding(1).bias(false)));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(norm1(conv1(x)));
    x = torch::relu(norm2(conv2(x)));
    x = torch::relu(norm3(conv3(x)));
    return torch::tanh(conv4(x));
  }
  nn::ConvTranspose2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr}, conv4{nullptr};
  nn::BatchNorm2d norm1{nullptr}, norm2{nullptr}, norm3{nullptr};
};
TORCH_MODULE(Generator);

struct DiscriminatorImpl : nn::Module {
  DiscriminatorImpl() {
    using Options = nn::Conv2dOptions;
    conv1 = register_module("conv1", nn::Conv2d(Options(1, 8, 4).stride(2).padding(1).bias(false)));
    conv2 = register_module("conv2", nn::Conv2d(Options(8, 16, 4).stride(2).padding(1).bias(false)));
    norm2 = register_module("norm2", nn::BatchNorm2d(16));
    conv3 = register_module("conv3", nn::Conv2d(Options(16, 1, 7).bias(false)));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::leaky_relu(conv1(x), 0.2);
    x = torch::leaky_relu(norm2(conv2(x)), 0.2);
    return conv3(x).view({-1});
  }
  nn::Conv2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr};
  nn::BatchNorm2d norm2{nullptr};
};
TORCH_MODULE(Discriminator);

// Returns the sum of the losses.
const auto train_step = [](auto& generator, auto& discriminator, torch::optim::Optimizer& generator_optimizer,
                           torch::optim::Optimizer& discriminator_optimizer, torch::Tensor real, torch::Tensor noise) {
  namespace F = nn::functional;
  discriminator_optimizer.zero_grad();
  auto real_out = discriminator(real);
  auto real_loss = F::binary_cross_entropy_with_logits(real_out, torch::full_like(real_out, 0.9));
  real_loss.backward();
  auto fake = generator(noise);
  auto fake_out = discriminator(fake.detach());
  auto fake_loss = F::binary_cross_entropy_with_logits(fake_out, torch::zeros_like(fake_out));
  fake_loss.backward();
  discriminator_optimizer.step();

  generator_optimizer.zero_grad();
  auto out = discriminator(fake);
  auto loss = F::binary_cross_entropy_with_logits(out, torch::ones_like(out));
  loss.backward();
  generator_optimizer.step();
  return (real_loss + fake_loss + loss).detach();
};

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : ".";
  const int64_t steps = argc > 2 ? std::stoll(argv[2]) : 20;
  torch::manual_seed(1);
  Generator generator;
  Discriminator discriminator;
  auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Digits(folder).map(torch::data::transforms::Normalize<>(0.5, 0.5)).map(torch::data::transforms::Stack<>()),
      torch::data::DataLoaderOptions(kBatch).drop_last(true));
  torch::optim::Adam generator_optimizer(generator->parameters(), torch::optim::AdamOptions(2e-4).betas({0.5, 0.5}));
  torch::optim::Adam discriminator_optimizer(discriminator->parameters(),
                                             torch::optim::AdamOptions(2e-4).betas({0.5, 0.5}));
  std::ofstream log(folder + "/losses.txt", std::ios::app);
  log.precision(17);
  int64_t step = 0;
  while (step < steps) {
    for (auto& batch : *loader) {
      if (step == steps) break;
      auto noise = torch::randn({kBatch, kNoise, 1, 1});
      auto loss = train_step(generator, discriminator, generator_optimizer, discriminator_optimizer, batch.data, noise);
      log << step++ << " " << loss.item<double>() << std::endl;
    }
  }
  return 0;
}
