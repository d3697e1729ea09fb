#pragma once
#include "tessera/rules/detail/rule.h"

#include <c10/core/MemoryFormat.h>

#include <optional>

// The strides that ATen gives to results, computed from global sizes and strides.
namespace tessera::rules {

bool is_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides);  // non-overlapping and dense
bool is_contiguous(c10::IntArrayRef sizes, c10::IntArrayRef strides);
Sizes contiguous(c10::IntArrayRef sizes);
// Dense strides of `sizes` whose dims have the memory order of the strides `like`.
Sizes dense_strides(c10::IntArrayRef sizes, c10::IntArrayRef like);

// The result of an elementwise op (TensorIterator). If all operands are dense with equal strides, the result has those.
// Otherwise the first operand that orders two dims determines their order.
Sizes pointwise_strides(c10::IntArrayRef sizes, c10::ArrayRef<TensorArg> operands);

// The result of empty_like, clone, _to_copy. No `format` means Preserve.
Sizes like_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::MemoryFormat> format);
std::optional<c10::MemoryFormat> memory_format_at(const OpQuery& query, int arg);

// Strides of a view with other sizes, or none if a view is not possible.
std::optional<Sizes> view_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::IntArrayRef view_sizes);
Sizes channels_last(c10::IntArrayRef sizes);  // 4 or 5 dims
bool is_channels_last(c10::IntArrayRef sizes, c10::IntArrayRef strides);

// The number of windows of a pooling or unfolding along one dim. The stride must be positive.
int64_t pooled_size(int64_t in, int64_t kernel, int64_t pad, int64_t stride, int64_t dilation, bool ceil);

}  // namespace tessera::rules
