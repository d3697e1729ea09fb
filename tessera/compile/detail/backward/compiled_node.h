#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/backward/backward_program.h"

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

namespace tessera::compiler {

// The autograd node of a compiled forward. It runs the backward program.
class CompiledNode : public torch::autograd::Node {
 public:
  explicit CompiledNode(std::shared_ptr<BackwardProgram> program) : program_(std::move(program)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "CompiledBackward"; }
  void release_variables() override { saved_.clear(); }

  // `numbers`: those of the call of forward.
  void save(Tensors saved, std::vector<double> numbers);
  const Tensors& saved() const { return saved_; }
  const std::vector<double>& numbers() const { return numbers_; }
  const std::shared_ptr<BackwardProgram>& program() const { return program_; }

 private:
  std::shared_ptr<BackwardProgram> program_;
  Tensors saved_;
  std::vector<double> numbers_;
  std::vector<int64_t> versions_;  // of the saved tensors, to detect later writes
};

// An identity node behind each result of CompiledNode.
// Of the nodes that are ready, autograd runs the one that was created last. ModuleProgram creates these nodes in the
// order that makes gradients arrive as in eager mode.
struct DeliverNode : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
  std::string name() const override { return "DeliverBackward"; }
};

}  // namespace tessera::compiler
