#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <vector>

// Embedding lookup in a table that is sharded by rows (rules/embedding.cpp).
namespace tessera {
namespace {

// `weight` has rows offset, offset + 1, ... of a table of `rows` rows. Returns zeros for the rows of other ranks.
at::Tensor masked_embedding(const at::Tensor& weight, const at::Tensor& indices, int64_t padding_idx,
                            bool scale_grad_by_freq, bool sparse, int64_t rows, int64_t offset) {
  if (indices.is_cuda()) {  // the host does not wait for the values
    at::_assert_async(indices.ge(0).logical_and_(indices.lt(rows)).all(), "embedding: an index is out of range");
  } else if (indices.numel() > 0) {
    int64_t lowest = indices.min().item<int64_t>(), highest = indices.max().item<int64_t>();
    TORCH_CHECK_INDEX(lowest >= 0 && highest < rows, "embedding: indices from ", lowest, " to ", highest,
                      " for a table of ", rows, " rows");
  }
  auto sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  if (weight.size(0) == 0 || indices.numel() == 0) return at::zeros(sizes, weight.options());
  auto local = indices.sub(offset);
  auto elsewhere = local.lt(0).logical_or_(local.ge(weight.size(0)));
  auto found = at::embedding(weight, local.masked_fill_(elsewhere, 0), padding_idx, scale_grad_by_freq, sparse);
  return found.masked_fill_(elsewhere.unsqueeze(-1), 0);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def(
      "masked_embedding(Tensor weight, Tensor indices, int padding_idx, bool scale_grad_by_freq, bool sparse, int "
      "rows, "
      "int offset) -> Tensor");
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) { m.impl("masked_embedding", masked_embedding); }

}  // namespace tessera
