#pragma once
#include "tessera/rules/detail/rule.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <vector>

// A call of an op on meta tensors that have the global sizes of the call. Meta tensors have no memory, so the call
// costs no computation and no communication. Wrong arguments give the error that the op has for plain tensors.
namespace tessera::rules {

// Runs the op. Returns sizes and strides of its new outputs (an undefined one has sizes []), or nothing if LibTorch
// cannot run this op on meta tensors. Throws the error of the op for wrong arguments.
// A composite kernel that plain tensors do not run has other errors: it is used only with `other_code`.
std::optional<std::vector<OutInfo>> run_on_meta(const c10::OperatorHandle& op, const OpQuery& query,
                                                bool other_code = false);

// The rule of a call: checks the arguments by run_on_meta(), then calls the rule function with OpQuery::dense_outs set.
Rule evaluate(const OpRule& rule, const c10::OperatorHandle& op, OpQuery query);

}  // namespace tessera::rules
