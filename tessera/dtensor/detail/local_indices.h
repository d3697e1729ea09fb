#pragma once
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>

namespace tessera {

// Maps positions in a rank's local tensor to indices in the global tensor, both row-major.
//
// `ranges` lists for each dim the number of ranges of global indices that the rank has, then the begin and end of each.
// Empty `ranges` mean the full tensor. It is the format of TensorSpec::range_list(), and an argument of registered ops.
//
//   sizes [4, 6], ranges {1, 0,2, 2, 0,1, 3,4}: rows 0 and 1 of columns 0 and 3
//     position   0  1  2  3
//     index      0  3  6  9
class LocalIndices {
 public:
  LocalIndices(c10::IntArrayRef sizes, c10::IntArrayRef ranges) {
    full_ = ranges.empty();
    for (auto s : sizes) numel_ *= s;
    if (full_) return;
    numel_ = 1;
    int64_t stride = 1;
    dims_.resize(sizes.size());
    const int64_t* at = ranges.data();
    for (size_t d = 0; d < sizes.size(); d++) {
      const auto n = static_cast<size_t>(*at++);
      dims_[d].ranges = {at, 2 * n};
      at += 2 * n;
      for (size_t r = 0; r < 2 * n; r += 2) dims_[d].local_size += dims_[d].ranges[r + 1] - dims_[d].ranges[r];
      if (dims_[d].local_size != sizes[d]) last_sharded_ = d;
      numel_ *= dims_[d].local_size;
    }
    for (size_t d = sizes.size(); d-- > 0;) {
      dims_[d].stride = stride;
      stride *= sizes[d];
    }
  }

  int64_t numel() const { return numel_; }

  // Splits the positions [begin, end) into ranges that are contiguous in the local and in the global tensor. Calls
  // f(position, index, count) for each range, in order.
  template <class F>
  void for_each_range(int64_t begin, int64_t end, F f) const {
    if (begin >= end) return;
    if (full_ || dims_.empty()) return f(begin, begin, end - begin);
    // The dims after last_sharded_ are not sharded, so one range of it is contiguous in memory.
    const auto& sharded = dims_[last_sharded_];
    const int64_t row = sharded.local_size * sharded.stride;
    int64_t position = begin / row * row;
    for (; position < end; position += row) {
      const int64_t base = row_index(position / row);
      int64_t at = position;
      for (size_t r = 0; r < sharded.ranges.size(); r += 2) {
        const int64_t count = (sharded.ranges[r + 1] - sharded.ranges[r]) * sharded.stride;
        const int64_t from = std::max(at, begin), to = std::min(at + count, end);
        if (from < to) f(from, base + sharded.ranges[r] * sharded.stride + (from - at), to - from);
        at += count;
      }
    }
  }

 private:
  struct Dim {
    c10::IntArrayRef ranges;  // begin, end, begin, end, ...
    int64_t local_size = 0, stride = 0;
  };

  // The global index at which row `n` of the local tensor begins. Rows are counted over the dims before last_sharded_.
  int64_t row_index(int64_t n) const {
    int64_t index = 0;
    for (size_t d = last_sharded_; d-- > 0;) {
      int64_t k = n % dims_[d].local_size;
      n /= dims_[d].local_size;
      size_t r = 0;
      for (; k >= dims_[d].ranges[r + 1] - dims_[d].ranges[r]; r += 2) k -= dims_[d].ranges[r + 1] - dims_[d].ranges[r];
      index += (dims_[d].ranges[r] + k) * dims_[d].stride;
    }
    return index;
  }

  bool full_ = true;
  int64_t numel_ = 1;
  size_t last_sharded_ = 0;
  c10::SmallVector<Dim, 6> dims_;
};

}  // namespace tessera
