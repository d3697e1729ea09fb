#pragma once
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <vector>

// Assigns gradients to buckets, one collective per bucket. Pure: sizes in, lists of indices out.
namespace tessera::data_parallel {

struct BucketItem {
  int64_t bytes = 0;
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::kCPU;
  bool alone = false;  // needs its own bucket: a sparse gradient
};

// Bytes per bucket, as in PyTorch: the first bucket is small, so that the first collective starts early in backward.
struct BucketLimits {
  int64_t first = int64_t{1} << 20;
  int64_t rest = int64_t{25} << 20;
};

using Bucket = std::vector<size_t>;   // indices of items
using Buckets = std::vector<Bucket>;  // in the order in which they are reduced

// Adds the items in the given order to one open bucket per dtype and device. A bucket that reaches its limit is closed,
// and a new one is opened. Buckets are returned in the order in which they are closed; those still open come last.
// Every rank must call it with equal arguments.
// Example:  limits 8, 16; items of 4 bytes  ->  {0 1} {2 3 4 5} {6 ...}
Buckets fill_buckets(const std::vector<BucketItem>& items, const std::vector<size_t>& order, BucketLimits limits = {});

std::vector<size_t> first_to_last(size_t items);  // 0 1 2 ...

std::ostream& operator<<(std::ostream& out, const Buckets& buckets);  // {3 2} {1 0}

}  // namespace tessera::data_parallel
