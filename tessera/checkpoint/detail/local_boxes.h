#pragma once
#include "tessera/checkpoint/detail/box.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace tessera::dcp {

// What this rank has of a tensor, plain or distributed, in boxes: one, or several where a strided cut stands alone, or
// none. A plain tensor is one box, all of it.
//
//   10 rows, [SS(0,2)] on 2 ranks: rank 1 has rows [3:5] and [8:10], as rows 0:2 and 2:4 of its own tensor
struct Held {
  struct Part {
    Box box;   // global indices
    Sizes at;  // where it begins in `local`
  };
  at::Tensor local;  // detached; shares memory
  Sizes sizes;       // global
  std::vector<Part> parts;

  std::vector<Box> boxes() const;
  // The part of `local` that has these indices. Requires: they are inside of that part's box.
  at::Tensor view(const Part& part, const Box& what) const;
};

// Throws UsageError that names the tensor: for one that is Partial, whose value nobody has yet; and for one on the meta
// device.
Held held(const std::string& name, const at::Tensor& tensor);

}  // namespace tessera::dcp
