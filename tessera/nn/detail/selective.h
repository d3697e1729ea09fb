#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>
#include <vector>

// Selective checkpointing: the results of some ops, the expensive ones, are kept in forward and taken from there in
// recomputation, where the op is not run again. Everything else is computed again.
namespace tessera {

// Is the result of this call to be kept? Asked in forward only, once a call, in the order of the calls: so a policy may
// count ("every second aten::mm"). Ops are seen below autograd: torch::nn::Linear shows as aten::addmm or aten::mm. Of
// an op on distributed tensors the op itself is seen, and its collectives are saved with it. Not asked about ops that
// return or write to one of their arguments.
using KeepPolicy = std::function<bool(const c10::OperatorHandle& op)>;

// Keeps the results of these ops: "aten::mm", or one overload, "aten::sum.dim_IntList". Throws UsageError for a name
// that no op has, for one made of other ops, and for ops that only return or write to their arguments.
// Example:  checkpoint({.keep = keep_ops({"aten::mm", "aten::addmm"})}, block, x)
KeepPolicy keep_ops(const std::vector<std::string>& names);

namespace detail {
// Does the op make new tensors, and nothing else?
bool makes_tensors(const c10::OperatorHandle& op);
}  // namespace detail

}  // namespace tessera
