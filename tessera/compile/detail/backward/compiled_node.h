#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/backward/backward_program.h"

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

namespace tessera::compiler {

// The autograd node of a compiled forward. It runs the backward program. Of a split program it runs the part that the
// present backward needs: the gradients of the arguments, or of the parameters, or both. Its results are the gradients
// of the parameters, then those of the arguments.
class CompiledNode : public torch::autograd::Node {
 public:
  explicit CompiledNode(std::shared_ptr<BackwardProgram> program) : program_(std::move(program)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "CompiledBackward"; }
  void release_variables() override {
    saved_.clear();
    first_part_ = {};
  }

  // `numbers`: those of the call of forward.
  void save(Tensors saved, std::vector<double> numbers);
  const Tensors& saved() const { return saved_; }
  const std::vector<double>& numbers() const { return numbers_; }
  const std::shared_ptr<BackwardProgram>& program() const { return program_; }

 private:
  // A run of the first part of a split program, for a later run of the second with the same gradients.
  struct FirstPart {
    Tensors gradients;              // of the outputs
    std::vector<int64_t> versions;  // of these
    Tensors for_weights;
    bool is_of(const Tensors& others) const;
  };
  torch::autograd::variable_list run_parts(const Tensors& gradients);

  std::shared_ptr<BackwardProgram> program_;
  FirstPart first_part_;
  Tensors saved_;
  std::vector<double> numbers_;
  // Of the saved tensors, to detect later writes, and set_data().
  std::vector<int64_t> versions_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
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
