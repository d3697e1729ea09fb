#pragma once
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <vector>

// Which gradients travel together. Pure: sizes in, lists of indices out.
namespace tessera::data_parallel {

struct BucketItem {
  int64_t bytes = 0;
  c10::ScalarType dtype = c10::kFloat;
  c10::Device device = c10::kCPU;
  bool alone = false;  // a bucket of its own: a sparse gradient
};

// PyTorch's: the first bucket is small, so that the first collective starts early in backward.
struct BucketLimits {
  int64_t first = int64_t{1} << 20;
  int64_t rest = int64_t{25} << 20;
};

using Bucket = std::vector<size_t>;   // indices of items
using Buckets = std::vector<Bucket>;  // in the order in which they are reduced

// Walks the items in the order given and fills a bucket for each dtype and device until its limit is reached or passed;
// then the next one begins, with the next limit. Buckets come in the order in which they were filled, what is left over
// last. Every rank must call it with equal arguments.
// Example:  limits 8, 16; items of 4 bytes  ->  {0 1} {2 3 4 5} {6 ...}
Buckets fill_buckets(const std::vector<BucketItem>& items, const std::vector<size_t>& order, BucketLimits limits = {});

std::vector<size_t> first_to_last(size_t items);

std::ostream& operator<<(std::ostream& out, const Buckets& buckets);  // {3 2} {1 0}

}  // namespace tessera::data_parallel
