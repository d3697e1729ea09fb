#pragma once
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

namespace tessera::train {

// How values are distributed, in buckets of equal width between the smallest and the largest one. Values that are inf
// or NaN do not count.
struct Histogram {
  double min = 0, max = 0, num = 0, sum = 0, sum_squares = 0;
  std::vector<double> limits = {};  // the upper ends of the buckets
  std::vector<double> counts = {};  // values in each bucket
  bool operator==(const Histogram&) const = default;
};
using NamedHistograms = std::vector<std::pair<std::string, Histogram>>;

// Histograms of plain and distributed tensors. Each element of a distributed tensor counts once. All ranks of its mesh
// must call it, and get the same result. Two collectives per mesh axis for all tensors of a mesh.
std::vector<Histogram> histograms_of(const std::vector<at::Tensor>& tensors);
// Of all parameters ("weights/name") and their gradients ("gradients/name") with a floating-point dtype.
NamedHistograms histograms_of(const torch::nn::Module& module);

}  // namespace tessera::train
