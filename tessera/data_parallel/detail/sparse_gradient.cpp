#include "tessera/data_parallel/detail/sparse_gradient.h"

#include "tessera/base/error.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <vector>

namespace tessera::data_parallel {

at::Tensor reduce_sparse_gradient(const at::Tensor& gradient, const at::Tensor& like, double scale,
                                  const comm::Group& group, const std::string& name) {
  TESSERA_CHECK(!gradient.defined() || gradient.layout() == c10::kSparse, UsageError, "the gradient of ", name, " is ",
                gradient.layout(),
                ", but its embedding was created with sparse(true), and only sparse gradients of it ",
                "can be reduced. If the parameter is also used elsewhere, create the embedding with sparse(false)");
  const auto make = [&](const at::Tensor& indices, const at::Tensor& values) {
    return at::_sparse_coo_tensor_unsafe(indices, values, like.sizes(), like.options().layout(c10::kSparse));
  };
  const auto longs = at::TensorOptions(like.device()).dtype(at::kLong);
  std::vector<int64_t> values_sizes(like.sizes().begin(), like.sizes().end());  // (entries, embedding)
  const auto with_entries = [&](int64_t count) {
    values_sizes[0] = count;
    return at::IntArrayRef(values_sizes);
  };
  auto indices = at::empty({1, 0}, longs), values = at::empty(with_entries(0), like.options().requires_grad(false));
  if (gradient.defined()) {
    const auto mine = gradient.coalesce();
    indices = mine.indices().contiguous();
    values = mine.values().contiguous();
  }
  auto counts = at::empty({group->size()}, longs);
  group->all_gather_into_tensor(counts, at::full({1}, values.size(0), longs)).wait();
  counts = counts.cpu();
  if (counts.sum().item<int64_t>() == 0) return make(indices, values);
  std::vector<at::Tensor> all_indices, all_values;
  for (int64_t r = 0; r < group->size(); r++) {
    const auto count = counts.data_ptr<int64_t>()[r];
    all_indices.push_back(at::empty({1, count}, longs));
    all_values.push_back(at::empty(with_entries(count), values.options()));
  }
  group->all_gather(all_indices, indices).wait();
  group->all_gather(all_values, values).wait();
  const auto sum = make(at::cat(all_indices, 1), at::cat(all_values)).coalesce();
  return make(sum.indices(), sum.values() * scale)._coalesced_(true);
}

}  // namespace tessera::data_parallel
