#pragma once
#include "tessera/nn/holder.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera::pipelining {

// From the output of the stage or layer before to the output of this one.
using StageForward = std::function<at::Tensor(const at::Tensor&)>;
using StageChildren = std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>;

// A stage of a pipeline as one module: modules of a model, and a function that runs them.
struct StageModuleImpl : torch::nn::Module {
  StageModuleImpl(StageForward forward, const StageChildren& children);
  StageModuleImpl(StageForward forward, const std::vector<at::Tensor>& parameters);
  at::Tensor forward(const at::Tensor& x) { return forward_(x); }

 private:
  StageForward forward_;
};
TESSERA_MODULE(StageModule);

}  // namespace tessera::pipelining
