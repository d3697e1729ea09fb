#pragma once
#include "tessera/rules/detail/rule.h"
#include "tessera/testing/rule_oracle.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

// A call of an op by name, its tensors apart from its other arguments.
namespace tessera::testing {

struct Slot {
  int arg, element;  // element -1: the argument itself
  bool written;
};

class OpCall {
 public:
  explicit OpCall(const Sample& sample);  // fills in defaults; throws UsageError if there is no such op

  const c10::FunctionSchema& schema() const { return op_.schema(); }
  const std::vector<Slot>& slots() const { return slots_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }  // one a slot
  std::vector<c10::IValue>& args() { return args_; }
  const std::vector<c10::IValue>& args() const { return args_; }
  rules::OpQuery query(const std::vector<int>& plain_args = {}) const;

  // Runs `op` ("" for this one) with these tensors in the slots, then `more` arguments. Gives the fresh outputs one by
  // one; undefined ones stay so. The tensors are written to where the op does.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& tensors, const std::string& op = "",
                              const std::vector<c10::IValue>& more = {}) const;
  bool has_kernel() const;  // on a CPU

 private:
  c10::OperatorHandle op_;
  std::vector<c10::IValue> args_;
  std::vector<Slot> slots_;
  std::vector<at::Tensor> tensors_;
};

c10::OperatorHandle find_op(const std::string& name);  // "aten::add.Tensor"

}  // namespace tessera::testing
