#define AT_PER_OPERATOR_HEADERS  // ExpandUtils.h would otherwise include every op
#include "tessera/rules/detail/geometry.h"

#include "tessera/base/error.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorUtils.h>
#include <c10/core/Contiguity.h>

#include <algorithm>
#include <numeric>

namespace tessera::rules {
namespace {

Sizes to_sizes(c10::IntArrayRef values) { return Sizes(values); }

bool all_have_sizes(c10::IntArrayRef sizes, c10::ArrayRef<TensorArg> operands) {
  return std::all_of(operands.begin(), operands.end(), [&](const TensorArg& t) { return t.sizes == sizes; });
}

// TensorIterator's order of two dims for one operand: < 0: dim a is inside dim b; > 0: outside; 0: this operand does
// not order them.
int compare_dims(const TensorArg& operand, c10::IntArrayRef sizes, int64_t a, int64_t b) {
  int64_t missing = static_cast<int64_t>(sizes.size() - operand.sizes.size());
  auto stride = [&](int64_t d) {
    int64_t own = d - missing;
    bool broadcast = own < 0 || (operand.sizes[own] == 1 && sizes[d] != 1);
    return broadcast ? int64_t{0} : operand.strides[own];
  };
  int64_t stride_a = stride(a), stride_b = stride(b);
  if (stride_a == 0 || stride_b == 0) return 0;
  if (stride_a != stride_b) return stride_a < stride_b ? -1 : 1;
  return sizes[a] > sizes[b] ? 1 : 0;
}

int compare_dims(c10::ArrayRef<TensorArg> operands, c10::IntArrayRef sizes, int64_t a, int64_t b) {
  for (const auto& operand : operands)
    if (int order = compare_dims(operand, sizes, a, b)) return order;
  return 0;
}

// Dims from the innermost to the outermost. It is an insertion sort as in ATen, because the comparison is not
// transitive.
Sizes order_of_dims(c10::IntArrayRef sizes, c10::ArrayRef<TensorArg> operands) {
  auto ndim = static_cast<int64_t>(sizes.size());
  Sizes order(sizes.size());
  std::iota(order.rbegin(), order.rend(), 0);
  for (int64_t i = 1; i < ndim; i++) {
    int64_t at = i;
    for (int64_t before = i - 1; before >= 0; before--) {
      int swap = compare_dims(operands, sizes, order[before], order[at]);
      if (swap > 0) {
        std::swap(order[before], order[at]);
        at = before;
      } else if (swap < 0) {
        break;
      }
    }
  }
  return order;
}

}  // namespace

bool is_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return c10::_compute_non_overlapping_and_dense<int64_t>(sizes, strides);
}

bool is_contiguous(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return c10::_compute_contiguous<int64_t>(
      sizes, strides, std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>()));
}

Sizes contiguous(c10::IntArrayRef sizes) {
  Sizes strides(sizes.size());
  int64_t next = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = next;
    next *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

Sizes dense_strides(c10::IntArrayRef sizes, c10::IntArrayRef like) {
  return to_sizes(at::infer_dense_strides(sizes, like));
}

Sizes channels_last(c10::IntArrayRef sizes) {
  return sizes.size() == 4 ? to_sizes(c10::get_channels_last_strides_2d(sizes))
                           : to_sizes(c10::get_channels_last_strides_3d(sizes));
}

bool is_channels_last(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return (sizes.size() == 4 || sizes.size() == 5) && to_sizes(strides) == channels_last(sizes);
}

Sizes pointwise_strides(c10::IntArrayRef sizes, c10::ArrayRef<TensorArg> operands) {
  if (all_have_sizes(sizes, operands)) {
    auto all = [&](auto holds) { return std::all_of(operands.begin(), operands.end(), holds); };
    if (all([&](const TensorArg& t) { return is_contiguous(t.sizes, t.strides); })) return contiguous(sizes);
    if (all([&](const TensorArg& t) { return is_channels_last(t.sizes, t.strides); })) return channels_last(sizes);
    auto first = operands[0].strides;
    if (is_dense(sizes, first) && all([&](const TensorArg& t) { return t.strides == first; })) return to_sizes(first);
  }
  Sizes strides(sizes.size());
  int64_t next = 1;
  for (auto d : order_of_dims(sizes, operands)) {
    strides[d] = next;
    next *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

Sizes like_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::MemoryFormat> format) {
  switch (format.value_or(c10::MemoryFormat::Preserve)) {
    case c10::MemoryFormat::ChannelsLast:
    case c10::MemoryFormat::ChannelsLast3d:
      return channels_last(sizes);
    case c10::MemoryFormat::Preserve:
      if (is_dense(sizes, strides)) return to_sizes(strides);
      return to_sizes(at::infer_dense_strides(sizes, strides));
    default:
      return contiguous(sizes);
  }
}

std::optional<c10::MemoryFormat> memory_format_at(const OpQuery& query, int arg) {
  if (query.is_none(arg)) return std::nullopt;
  return static_cast<c10::MemoryFormat>(query.int_at(arg));
}

std::optional<Sizes> view_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::IntArrayRef view_sizes) {
  auto found = at::detail::computeStride(sizes, strides, view_sizes);
  if (!found) return std::nullopt;
  return to_sizes(*found);
}

int64_t pooled_size(int64_t in, int64_t kernel, int64_t pad, int64_t stride, int64_t dilation, bool ceil) {
  TESSERA_CHECK(stride > 0, UsageError, "a pooling or unfolding with stride ", stride, "; it must be positive");
  int64_t last = in + 2 * pad - dilation * (kernel - 1) - 1;
  int64_t out = (last + (ceil ? stride - 1 : 0)) / stride + 1;
  if (ceil && (out - 1) * stride >= in + pad) out--;  // a window must begin inside the input or the left pad
  return out;
}

}  // namespace tessera::rules
