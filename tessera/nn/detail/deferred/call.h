#pragma once
#include "tessera/nn/detail/deferred/tape.h"

#include <optional>
#include <string>
#include <vector>

namespace tessera::detail::deferred {

// An op and its arguments, as the fallback of deferred_init finds them on the stack.
struct DeferredCall {
  DeferredCall(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  std::string name() const { return toString(op.operator_name()); }
  // The index of the argument with this name, if the op has one.
  std::optional<size_t> find(const char* name) const;
  bool is_factory() const { return tensors == 0 && returns_tensors && find("device"); }
  // The op returns views of its arguments, and does not read or write their memory.
  bool is_view() const;
  bool is_written(size_t argument) const;

  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::vector<c10::IValue> arguments;
  size_t tensors = 0;                   // the number of tensor arguments
  at::Tensor first_deferred;            // the first deferred argument, or undefined
  const DeferredMeta* first = nullptr;  // its DeferredMeta
  bool distributed = false;             // some argument is distributed
  bool writes = false, writes_real = false, returns_tensors = false;
};

// Runs the decomposition of the op; each op of it goes through the dispatcher. False: the op has no decomposition.
bool decompose(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera::detail::deferred
