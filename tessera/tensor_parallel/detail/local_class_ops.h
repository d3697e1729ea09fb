#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

// Registered ops that read or write one class per position, where each rank has some of the classes.
//
//   x       (N, C', d1, ...): the local classes along `dim`
//   target  (N, d1, ...): a global class for each position, or ignore_index
//   runs    the global classes that x has: begin, end, begin, end, ... ascending
namespace tessera::detail {

// The classes of this rank.
struct LocalClasses {
  int64_t dim;
  std::vector<int64_t> runs;
  int64_t num_classes;  // global
  int64_t ignore_index;
};

// x at the target; zero if another rank has that class or the target is ignore_index. So the sum over the ranks is x at
// the target. Throws IndexError for a target that is not a class. Returns (N, d1, ...).
// tessera::pick_class(Tensor x, Tensor target, int dim, int[] runs, int num_classes, int ignore_index) -> Tensor
at::Tensor pick_class(const at::Tensor& x, const at::Tensor& target, const LocalClasses& classes);

// Adds `value` to x at each target that this rank has and that is not ignore_index.
// tessera::add_to_class_(Tensor(a!) x, Tensor target, Tensor value, int dim, int[] runs, int ignore_index)
//     -> Tensor(a!)
void add_to_class_(at::Tensor& x, const at::Tensor& target, const at::Tensor& value, const LocalClasses& classes);

}  // namespace tessera::detail
