#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/replay/executable.h"

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

namespace tessera::compiler {

// A backward program that compiled forwards share. See compiled_module.h.
struct BackwardProgram;

// Passes a gradient on. See CompiledForward::run.
struct DeliverNode : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  std::string name() const override { return "DeliverBackward"; }
};

// Stands in the autograd graph for all that a compiled forward did: runs its backward program.
class CompiledNode : public torch::autograd::Node {
 public:
  explicit CompiledNode(std::shared_ptr<BackwardProgram> program) : program_(std::move(program)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "CompiledBackward"; }
  void release_variables() override { saved_.clear(); }

  void save(Tensors saved) {
    saved_ = std::move(saved);
    for (const auto& t : saved_) versions_.push_back(t._version());
  }
  const Tensors& saved() const { return saved_; }
  const std::shared_ptr<BackwardProgram>& program() const { return program_; }

 private:
  std::shared_ptr<BackwardProgram> program_;
  Tensors saved_;
  std::vector<int64_t> versions_;  // when they were saved
};

}  // namespace tessera::compiler
