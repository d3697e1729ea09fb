#pragma once
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>

namespace tessera {

// The elements of a rank's piece by their place in the global tensor, row-major: stretches that follow each other in
// both are handed out whole.
//
// `runs` says, dim after dim, how many runs of global indices the piece has and where they begin and end; empty: the
// piece is the whole tensor. It is what TensorSpec::run_list() gives, and travels as an argument of registered ops.
//
//   sizes [4, 6], runs {1, 0,2, 2, 0,1, 3,4}: rows 0 and 1 of columns 0 and 3
//     position   0  1  2  3
//     index      0  3  6  9
class Piece {
 public:
  Piece(c10::IntArrayRef sizes, c10::IntArrayRef runs) {
    whole_ = runs.empty();
    for (auto s : sizes) numel_ *= s;
    if (whole_) return;
    numel_ = 1;
    int64_t stride = 1;
    dims_.resize(sizes.size());
    const int64_t* at = runs.data();
    for (size_t d = 0; d < sizes.size(); d++) {
      const auto n = static_cast<size_t>(*at++);
      dims_[d].runs = {at, 2 * n};
      at += 2 * n;
      for (size_t r = 0; r < 2 * n; r += 2) dims_[d].held += dims_[d].runs[r + 1] - dims_[d].runs[r];
      if (dims_[d].held != sizes[d]) last_cut_ = d;
      numel_ *= dims_[d].held;
    }
    for (size_t d = sizes.size(); d-- > 0;) {
      dims_[d].stride = stride;
      stride *= sizes[d];
    }
  }

  int64_t numel() const { return numel_; }

  // Calls f(position, index, count) for the stretches that make up positions [begin, end), in order.
  template <class F>
  void for_each_stretch(int64_t begin, int64_t end, F f) const {
    if (begin >= end) return;
    if (whole_ || dims_.empty()) return f(begin, begin, end - begin);
    const auto& cut = dims_[last_cut_];  // the dims behind it are whole: a run of it is one stretch
    const int64_t row = cut.held * cut.stride;
    int64_t position = begin / row * row;
    for (; position < end; position += row) {
      const int64_t base = row_index(position / row);
      int64_t at = position;
      for (size_t r = 0; r < cut.runs.size(); r += 2) {
        const int64_t count = (cut.runs[r + 1] - cut.runs[r]) * cut.stride;
        const int64_t from = std::max(at, begin), to = std::min(at + count, end);
        if (from < to) f(from, base + cut.runs[r] * cut.stride + (from - at), to - from);
        at += count;
      }
    }
  }

 private:
  struct Dim {
    c10::IntArrayRef runs;  // begin, end, begin, end, ...
    int64_t held = 0, stride = 0;
  };

  // The global index at which the n-th row of the piece begins; rows are counted over the dims before last_cut_.
  int64_t row_index(int64_t n) const {
    int64_t index = 0;
    for (size_t d = last_cut_; d-- > 0;) {
      int64_t k = n % dims_[d].held;
      n /= dims_[d].held;
      size_t r = 0;
      for (; k >= dims_[d].runs[r + 1] - dims_[d].runs[r]; r += 2) k -= dims_[d].runs[r + 1] - dims_[d].runs[r];
      index += (dims_[d].runs[r] + k) * dims_[d].stride;
    }
    return index;
  }

  bool whole_ = true;
  int64_t numel_ = 1;
  size_t last_cut_ = 0;
  c10::SmallVector<Dim, 6> dims_;
};

}  // namespace tessera
