#pragma once
#include "tessera/rules/detail/rule.h"
#include "tessera/testing/rule_oracle.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

// A call of an op by name. Gives access to its tensors separately from its other arguments.
namespace tessera::testing {

// The position of a tensor among the arguments.
struct TensorSlot {
  int arg, element;  // element -1: the argument itself
  bool written;
};

class OpCall {
 public:
  explicit OpCall(const Sample& sample);  // adds default arguments; throws UsageError if the op does not exist

  const c10::FunctionSchema& schema() const { return op_.schema(); }
  const std::vector<TensorSlot>& slots() const { return slots_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }  // one per slot
  std::vector<c10::IValue>& args() { return args_; }
  const std::vector<c10::IValue>& args() const { return args_; }
  rules::OpQuery query(const std::vector<int>& plain_args = {}) const;

  // Runs `op` ("": this op) with these tensors in the slots and `more` arguments at the end. Returns the outputs that
  // are not aliases of written arguments, undefined ones included. The op may write to `tensors`.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& tensors, const std::string& op = "",
                              const std::vector<c10::IValue>& more = {}) const;
  bool has_kernel() const;  // for the device of its tensors

 private:
  c10::OperatorHandle op_;
  std::vector<c10::IValue> args_;
  std::vector<TensorSlot> slots_;
  std::vector<at::Tensor> tensors_;
};

c10::OperatorHandle find_op(const std::string& name);  // "aten::add.Tensor"

}  // namespace tessera::testing
