#include "tessera/pipelining/detail/stage_module.h"

#include <algorithm>

namespace tessera::pipelining {

StageModuleImpl::StageModuleImpl(StageForward forward, const StageChildren& children)
    : torch::nn::Module("PipelineStage"), forward_(std::move(forward)) {
  for (auto [name, child] : children) {
    std::ranges::replace(name, '.', '_');  // names of children must not contain dots
    if (!named_children().contains(name)) register_module(name, child);
  }
}

StageModuleImpl::StageModuleImpl(StageForward forward, const std::vector<at::Tensor>& parameters)
    : torch::nn::Module("PipelineStage"), forward_(std::move(forward)) {
  for (size_t i = 0; i < parameters.size(); ++i)
    register_parameter(std::to_string(i), parameters[i], parameters[i].requires_grad());
}

}  // namespace tessera::pipelining
