#pragma once
#include "tessera/checkpoint/detail/box.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace tessera::dcp {

// The boxes of a tensor, plain or distributed, that this rank stores: one, several (strided shards), or none. A plain
// tensor is one box.
//
//   10 rows, [SS(0,2)] on 2 ranks: rank 1 has rows [3:5] and [8:10], as rows 0:2 and 2:4 of its local tensor
struct LocalBoxes {
  struct Part {
    Box box;   // global indices
    Sizes at;  // its offsets in `local`
  };
  at::Tensor local;  // detached; shares memory
  Sizes sizes;       // global
  std::vector<Part> parts;

  std::vector<Box> boxes() const;
  // The view of `local` with these global indices. Requires: `box` is inside of part.box.
  at::Tensor view(const Part& part, const Box& box) const;
};

// Throws UsageError, with the name, for a Partial tensor and for one on the meta device.
LocalBoxes local_boxes(const std::string& name, const at::Tensor& tensor);

}  // namespace tessera::dcp
