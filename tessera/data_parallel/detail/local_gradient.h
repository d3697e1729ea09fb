#pragma once
#include "tessera/dtensor/detail/meta.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <ATen/core/Tensor.h>

#include <string>

// Data parallelism reduces local tensors: the local tensor of a DTensor, or the tensor itself.
namespace tessera::data_parallel {

using tessera::detail::local_or_self;

// The local tensor of parameter.grad(), which must be defined. If the gradient is a DTensor with other placements than
// its parameter (for example partial over a tensor parallel axis), it is redistributed first.
// Throws UsageError for gradients that cannot be reduced: a plain gradient of a DTensor, a sparse one, or one with a
// graph.
const at::Tensor& local_gradient(const at::Tensor& parameter, const std::string& name);

// The same for a gradient of a tensor with this spec (null: a plain tensor). Does not change .grad.
at::Tensor local_gradient(const at::Tensor& gradient, const SpecRef& spec, const std::string& name);

// Sets parameter.grad() to `local`, wrapped as a DTensor if the parameter is one. Shares the memory.
void set_local_gradient(const at::Tensor& parameter, const at::Tensor& local);

}  // namespace tessera::data_parallel
