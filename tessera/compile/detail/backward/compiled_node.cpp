#include "tessera/compile/detail/backward/compiled_node.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/meta.h"
#include "tessera/tracing/detail/tracer_key.h"

#include <ATen/core/grad_mode.h>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

std::vector<int64_t> versions_of(const Tensors& tensors) {
  std::vector<int64_t> versions;
  for (const auto& t : tensors) versions.push_back(t.defined() ? t._version() : -1);
  return versions;
}

}  // namespace

bool CompiledNode::FirstPart::is_of(const Tensors& others) const {
  if (gradients.empty() || versions != versions_of(others)) return false;
  for (size_t i = 0; i < gradients.size(); i++)
    if (!gradients[i].is_same(others[i])) return false;
  return true;
}

void CompiledNode::save(Tensors saved, std::vector<double> numbers) {
  saved_ = std::move(saved);
  numbers_ = std::move(numbers);
  versions_ = versions_of(saved_);
  storages_.clear();
  for (const auto& t : saved_) storages_.push_back(local_or_self(t).storage().getWeakStorageImpl());
}

torch::autograd::variable_list CompiledNode::apply(torch::autograd::variable_list&& gradients) {
  TESSERA_CHECK(!saved_.empty() || program_->saved_buffers.empty(), UsageError,
                "backward through a compiled module a second time, after its saved tensors were freed; pass "
                "retain_graph to the first backward");
  for (size_t i = 0; i < saved_.size(); i++) {
    TESSERA_CHECK(saved_[i]._version() == versions_[i], UsageError, "a tensor of shape ", saved_[i].sizes(),
                  " that the backward of a compiled module needs was modified in place after forward; clone it first");
    TESSERA_CHECK(
        local_or_self(saved_[i]).storage().unsafeGetStorageImpl() == storages_[i]._unsafe_get_target(), UsageError,
        "a tensor of shape ", saved_[i].sizes(),
        " that the backward of a compiled module needs got other memory after forward, as by set_data(); call ",
        "set_data() before forward, or after backward");
  }
  TESSERA_CHECK(!at::GradMode::is_enabled(), UsageError,
                "backward through a compiled module with create_graph: its gradients have no graph. Compile the step "
                "that computes both derivatives, or call the module itself, orig_mod()");
  const OneCaller::Scope calls(program_->caller);
  if (program_->numbers) *program_->numbers = numbers_;  // a later forward may have had others
  return program_->weights ? run_parts(gradients) : program_->run(saved_, std::move(gradients));
}

torch::autograd::variable_list CompiledNode::run_parts(const Tensors& gradients) {
  const auto& weights = *program_->weights;
  const size_t parameters = weights.result_specs.size(), results = num_outputs();
  bool for_parameters = false, for_arguments = false;
  for (size_t i = 0; i < results; i++)
    if (task_should_compute_output(i)) (i < parameters ? for_parameters : for_arguments) = true;
  auto part = std::exchange(first_part_, {});
  Tensors computed(results);
  // A tracer must see all ops, so it uses no result of an earlier run.
  if (for_arguments || tracing() || !part.is_of(gradients)) {
    auto found = program_->run(saved_, gradients);
    const auto arguments = found.begin() + static_cast<ptrdiff_t>(results - parameters);
    std::move(found.begin(), arguments, computed.begin() + static_cast<ptrdiff_t>(parameters));
    part = {gradients, versions_of(gradients), Tensors(arguments, found.end())};
  }
  if (for_parameters) {
    auto saved = std::move(part.for_weights);
    saved.insert(saved.end(), saved_.begin(), saved_.end());
    auto found = program_->weights->run(saved, gradients);
    std::move(found.begin(), found.end(), computed.begin());
  } else if (!tracing()) {
    first_part_ = std::move(part);
  }
  return computed;
}

}  // namespace tessera::compiler
