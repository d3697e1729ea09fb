#include "tessera/compile/detail/backward/compiled_node.h"

#include "tessera/base/error.h"

#include <ATen/core/grad_mode.h>

namespace tessera::compiler {

void CompiledNode::save(Tensors saved, std::vector<double> numbers) {
  saved_ = std::move(saved);
  numbers_ = std::move(numbers);
  for (const auto& t : saved_) versions_.push_back(t._version());
}

torch::autograd::variable_list CompiledNode::apply(torch::autograd::variable_list&& gradients) {
  TESSERA_CHECK(!saved_.empty() || program_->saved_buffers.empty(), UsageError,
                "backward through a compiled module a second time, after its saved tensors were freed; pass "
                "retain_graph to the first backward");
  for (size_t i = 0; i < saved_.size(); i++)
    TESSERA_CHECK(saved_[i]._version() == versions_[i], UsageError, "a tensor of shape ", saved_[i].sizes(),
                  " that the backward of a compiled module needs was modified in place after forward; clone it first");
  TESSERA_CHECK(!at::GradMode::is_enabled(), UsageError,
                "backward through a compiled module with create_graph: its gradients have no graph. Compile the step "
                "that computes both derivatives, or call the module itself, orig_mod()");
  const OneCaller::Scope calls(program_->caller);
  if (program_->numbers) *program_->numbers = numbers_;  // a later forward may have had others
  return program_->run(saved_, std::move(gradients));
}

}  // namespace tessera::compiler
