#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

// Reading and writing one class of each position, where this rank holds some of the classes. Registered ops.
//
//   x       (N, C', d1, ...): this rank's classes along `dim`
//   target  (N, d1, ...): a class of the whole for each position, or ignore_index
//   runs    which classes of the whole x has: begin, end, begin, end, ... ascending
namespace tessera::detail {

struct LocalClasses {
  int64_t dim;
  std::vector<int64_t> runs;
  int64_t num_classes;  // of the whole
  int64_t ignore_index;
};

// x at the target; zero where another rank has that class, or it is ignored. So the sum over the ranks is x at the
// target. Throws IndexError for a target that is no class. (N, d1, ...)
// tessera::pick_class(Tensor x, Tensor target, int dim, int[] runs, int num_classes, int ignore_index) -> Tensor
at::Tensor pick_class(const at::Tensor& x, const at::Tensor& target, const LocalClasses& piece);

// Adds a value to x at each target that is here and is not ignored.
// tessera::add_to_class_(Tensor(a!) x, Tensor target, Tensor value, int dim, int[] runs, int ignore_index)
//     -> Tensor(a!)
void add_to_class_(at::Tensor& x, const at::Tensor& target, const at::Tensor& value, const LocalClasses& piece);

}  // namespace tessera::detail
