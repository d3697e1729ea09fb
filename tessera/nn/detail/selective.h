#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>
#include <vector>

// Selective activation checkpointing (PyTorch: create_selective_checkpoint_contexts). Forward saves the outputs of some
// ops, usually expensive ones. Recomputation uses the saved outputs and does not run these ops again. It recomputes
// everything else.
namespace tessera {

// Returns true if the output of this call is saved (PyTorch: CheckpointPolicy.MUST_SAVE). Forward calls the policy once
// per op call, in order, so a policy may count ("every second aten::mm"). Ops appear below autograd: torch::nn::Linear
// appears as aten::addmm or aten::mm. For an op on distributed tensors, the policy sees the op itself; the result of
// its collectives is saved with it. Ops that return or write one of their arguments do not appear.
using KeepPolicy = std::function<bool(const c10::OperatorHandle& op)>;

// A policy that saves the outputs of these ops: "aten::mm", or one overload, "aten::sum.dim_IntList". Throws UsageError
// for an unknown name, for a composite op, and for ops that return or write their arguments.
// Example:  checkpoint({.keep = keep_ops({"aten::mm", "aten::addmm"})}, block, x)
KeepPolicy keep_ops(const std::vector<std::string>& names);

namespace detail {
// Whether all outputs of the op are new tensors and the op writes no argument.
bool makes_tensors(const c10::OperatorHandle& op);
}  // namespace detail

}  // namespace tessera
