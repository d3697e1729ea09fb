#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/redistribute/detail/plan.h"

#include <ATen/core/Tensor.h>

namespace tessera::redistribute {

// A local tensor whose collective may still be in flight (PyTorch: AsyncCollectiveTensor).
struct Local {
  at::Tensor tensor;
  comm::Group pending;  // null: ready. Otherwise call funcol::wait(tensor, pending) before you read it.
};

// Runs the plan's steps on this rank's local tensor. Every step consists of registered ops (aten or tessera), below
// autograd. If no local work follows the last collective, it stays in flight.
Local execute(const Plan& plan, const at::Tensor& local, const TensorSpec& from, const TensorSpec& to);

// Runs the plans of several tensors. Steps of the same kind on the same axis are coalesced into one collective.
std::vector<Local> execute_many(c10::ArrayRef<const Plan*> plans, at::TensorList locals,
                                c10::ArrayRef<const TensorSpec*> from, c10::ArrayRef<const TensorSpec*> to);

// The plan between two specs of one mesh. Plans are cached per rank; the cache is bounded.
const Plan& plan_between(const TensorSpec& from, const TensorSpec& to);

}  // namespace tessera::redistribute
