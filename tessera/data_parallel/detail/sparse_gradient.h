#pragma once
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>

namespace tessera::data_parallel {

// The sum over the ranks of sparse (COO) gradients with the sizes of `like`, times `scale`; coalesced. All-gathers the
// numbers of entries, then indices and values, which may differ in number. An undefined gradient has no entries.
// Blocks. Throws UsageError for a gradient that is not sparse; `name` is its parameter's.
at::Tensor reduce_sparse_gradient(const at::Tensor& gradient, const at::Tensor& like, double scale,
                                  const comm::Group& group, const std::string& name);

}  // namespace tessera::data_parallel
