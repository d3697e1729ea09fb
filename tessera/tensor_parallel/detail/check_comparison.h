#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

// Comparison of the tensors of a parallel run with those of a plain run, for check_parallel.
namespace tessera {

// One tensor of both runs.
struct Comparison {
  std::string module;  // that is named if they differ
  std::string what;    // "its input 0"
  size_t event;        // where in the plain run
  at::Tensor plain, found;
  std::vector<Placement> allowed;  // of a plain `found`; a DTensor has its own
  double scale = 0;                // the largest value of all tensors of this kind
};

// The result on this rank.
struct Compared {
  uint64_t matches = 0;   // bit i: `found` is the local tensor of `plain` with allowed[i]
  double difference = 0;  // for the first one, relative to the largest value
};

// The largest absolute value; 0 for an undefined or empty tensor.
double largest_of(const at::Tensor& t);

// Compares `found` with this rank's local tensor of `plain`. Rounding differences are allowed. Collective if `found` is
// a DTensor that is partial or on another mesh.
Compared compare(const Comparison& comparison, const DeviceMesh& mesh);

}  // namespace tessera
