#pragma once
#include "tessera/nn/detail/deferred/tape.h"

#include <optional>
#include <string>
#include <vector>

namespace tessera::detail::deferred {

// An op and its arguments, as deferred_init's fallback finds them on the stack.
struct DeferredCall {
  DeferredCall(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  std::string name() const { return toString(op.operator_name()); }
  // The argument of this name, if the op has one.
  std::optional<size_t> find(const char* name) const;
  bool is_factory() const { return tensors == 0 && returns_tensors && find("device"); }
  // Neither reads nor writes the memory of its arguments.
  bool is_view() const;
  bool is_written(size_t argument) const;

  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  std::vector<c10::IValue> arguments;
  size_t tensors = 0;
  at::Tensor first_deferred;            // of the arguments, if any is
  const DeferredMeta* first = nullptr;  // its recipe
  bool distributed = false;             // some argument is
  bool writes = false, writes_real = false, returns_tensors = false;
};

// Runs the op as the ops it is made of, which are dispatched one by one. False: it is made of none.
bool decompose(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace tessera::detail::deferred
