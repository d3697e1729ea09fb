#pragma once
#include "tessera/rules/detail/rule.h"

#include <c10/core/MemoryFormat.h>

#include <optional>

// Strides of results, from global geometry alone, as ATen would choose them.
namespace tessera::rules {

bool is_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides);  // non-overlapping and dense
bool is_contiguous(c10::IntArrayRef sizes, c10::IntArrayRef strides);
Sizes contiguous(c10::IntArrayRef sizes);
// Dense strides of `sizes` whose dims lie in the order of `like`'s.
Sizes dense_strides(c10::IntArrayRef sizes, c10::IntArrayRef like);

// An elementwise op (TensorIterator): operands all dense with equal strides hand those on; otherwise the dims lie in
// the order in which the first operands that tell have them.
Sizes pointwise_strides(c10::IntArrayRef sizes, c10::ArrayRef<TensorArg> operands);

// empty_like, clone, _to_copy: `format` none is Preserve.
Sizes like_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::MemoryFormat> format);
std::optional<c10::MemoryFormat> memory_format_at(const OpQuery& query, int arg);

// Strides of a view with other sizes; none if it cannot be a view.
std::optional<Sizes> view_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::IntArrayRef view_sizes);
Sizes channels_last(c10::IntArrayRef sizes);  // 4 or 5 dims
bool is_channels_last(c10::IntArrayRef sizes, c10::IntArrayRef strides);

}  // namespace tessera::rules
