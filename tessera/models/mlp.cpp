#include "tessera/models/mlp.h"

#include "tessera/base/error.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>

#include <cmath>

namespace tessera::models {
namespace {

at::Tensor activate(Activation activation, at::Tensor x) {
  switch (activation) {
    case Activation::None:
      return x;
    case Activation::Relu:
      return at::relu(x);
    case Activation::Sigmoid:
      return at::sigmoid(x);
  }
  TESSERA_FAIL(InternalError, "unknown activation ", static_cast<int>(activation));
}

}  // namespace

MLPConfig mlp_module(bool bias) { return {{{"net1", 10, 16, Activation::Relu}, {"net2", 16, 10}}, bias, /*seed=*/5}; }
MLPConfig simple_model() { return {{{"net1", 5, 8, Activation::Relu}, {"net2", 8, 4}, {"net3", 4, 12}}}; }
MLPConfig simple_mlp() { return {{{"net1", 50, 32, Activation::Relu}, {"net2", 32, 8, Activation::Sigmoid}}}; }
MLPConfig four_linears(int64_t width) {
  return {{{"fc1", width, width}, {"fc2", width, width}, {"fc3", width, width}, {"fc4", width, width}}};
}

MLPImpl::MLPImpl(MLPConfig config) : config(std::move(config)) {
  for (size_t i = 1; i < this->config.layers.size(); i++) {
    const auto &before = this->config.layers[i - 1], &layer = this->config.layers[i];
    TESSERA_CHECK(before.out == layer.in, UsageError, "MLP: ", before.name, " returns ", before.out, " features, but ",
                  layer.name, " takes ", layer.in);
  }
  MLPImpl::reset();
}

void MLPImpl::reset() {
  layers.clear();
  for (const auto& layer : config.layers)
    layers.push_back(
        register_module(layer.name, nn::Linear(torch::nn::LinearOptions(layer.in, layer.out).bias(config.bias))));
  if (config.seed) reset_parameters();
}

void MLPImpl::reset_parameters() {
  if (!config.seed) {
    for (auto& layer : layers) layer->reset_parameters();
    return;
  }
  at::NoGradGuard no_grad;
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(*config.seed);
  for (auto& layer : layers) {
    const double bound = 1 / std::sqrt(static_cast<double>(layer->options.in_features()));
    layer->weight.uniform_(-bound, bound, generator);
    if (layer->bias.defined()) layer->bias.uniform_(-bound, bound, generator);
  }
}

at::Tensor MLPImpl::forward(at::Tensor x) {
  for (size_t i = 0; i < layers.size(); i++) x = activate(config.layers[i].then, layers[i](x));
  return x;
}

MLPStackedImpl::MLPStackedImpl(int64_t n_layers, MLPConfig config) : n_layers(n_layers), config(std::move(config)) {
  MLPStackedImpl::reset();
}

void MLPStackedImpl::reset() {
  layers = register_module("layers", nn::ModuleList<MLP>());
  for (int64_t i = 0; i < n_layers; i++) layers->push_back(MLP(config));
}

at::Tensor MLPStackedImpl::forward(at::Tensor x) {
  for (auto& layer : layers) x = layer(x);
  return x;
}

}  // namespace tessera::models
