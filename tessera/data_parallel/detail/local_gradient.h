#pragma once
#include "tessera/placement/detail/tensor_spec.h"

#include <ATen/core/Tensor.h>

#include <string>

// A reducer works on what this rank holds: the tensor itself, or its piece of a distributed one.
namespace tessera::data_parallel {

const at::Tensor& local_value(const at::Tensor& parameter);

// This rank's piece of parameter.grad(), which must be there. First brings a distributed gradient to where its
// parameter lies (a sum that is still to be taken over another axis is taken here, once). Throws UsageError for what
// no reducer can take: a plain gradient of a distributed parameter, a sparse one, one with a graph of its own.
const at::Tensor& local_gradient(const at::Tensor& parameter, const std::string& name);

// The same of a gradient that belongs to a tensor that lies like this (null: a plain one), leaving it as it is.
at::Tensor local_gradient(const at::Tensor& gradient, const SpecRef& lies, const std::string& name);

// Makes `local` this rank's piece of parameter.grad(); the memory is shared.
void set_local_gradient(const at::Tensor& parameter, const at::Tensor& local);

}  // namespace tessera::data_parallel
