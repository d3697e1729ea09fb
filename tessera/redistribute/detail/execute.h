#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/redistribute/detail/plan.h"

#include <ATen/core/Tensor.h>

namespace tessera::redistribute {

// A local tensor that may still be on its way.
struct Local {
  at::Tensor tensor;
  comm::Group pending;  // null: ready. Else funcol::wait(tensor, pending) before reading it.
};

// Runs the plan's steps on this rank's piece. Every step is made of registered ops (aten or tessera), below autograd.
// The last collective is left under way where nothing has to follow it.
Local execute(const Plan& plan, const at::Tensor& local, const TensorSpec& from, const TensorSpec& to);

// Several tensors at once. Steps of the same kind on the same axis are coalesced into one collective.
std::vector<Local> execute_many(c10::ArrayRef<const Plan*> plans, at::TensorList locals,
                                c10::ArrayRef<const TensorSpec*> from, c10::ArrayRef<const TensorSpec*> to);

// The memoised plan between two specs of one mesh (bounded, per rank).
const Plan& plan_between(const TensorSpec& from, const TensorSpec& to);

}  // namespace tessera::redistribute
