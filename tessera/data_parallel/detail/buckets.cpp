#include "tessera/data_parallel/detail/buckets.h"

#include "tessera/base/error.h"

#include <map>
#include <numeric>
#include <ostream>
#include <utility>

namespace tessera::data_parallel {
namespace {

// The bucket that is being filled for one dtype and device.
struct OpenBucket {
  Bucket items;
  int64_t bytes = 0;
  bool first = true;  // limits.first applies
};

}  // namespace

Buckets fill_buckets(const std::vector<BucketItem>& items, const std::vector<size_t>& order, BucketLimits limits) {
  TESSERA_CHECK(limits.first > 0 && limits.rest > 0, UsageError, "a bucket holds at least one byte; the limits are ",
                limits.first, " and ", limits.rest);
  Buckets closed;
  std::map<std::pair<c10::ScalarType, std::pair<c10::DeviceType, c10::DeviceIndex>>, OpenBucket> open;
  std::vector<OpenBucket*> in_order;
  for (const size_t i : order) {
    const auto& item = items.at(i);
    if (item.alone) {
      closed.push_back({i});
      continue;
    }
    const auto [at, is_new] = open.try_emplace({item.dtype, {item.device.type(), item.device.index()}});
    auto& bucket = at->second;
    if (is_new) in_order.push_back(&bucket);
    bucket.items.push_back(i);
    bucket.bytes += item.bytes;
    if (bucket.bytes < (bucket.first ? limits.first : limits.rest)) continue;
    closed.push_back(std::exchange(bucket.items, {}));
    bucket.bytes = 0;
    bucket.first = false;
  }
  for (auto* bucket : in_order)
    if (!bucket->items.empty()) closed.push_back(std::move(bucket->items));
  return closed;
}

std::vector<size_t> first_to_last(size_t items) {
  std::vector<size_t> order(items);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

std::ostream& operator<<(std::ostream& out, const Buckets& buckets) {
  for (size_t b = 0; b < buckets.size(); b++) {
    out << (b ? " {" : "{");
    for (size_t i = 0; i < buckets[b].size(); i++) out << (i ? " " : "") << buckets[b][i];
    out << "}";
  }
  return out;
}

}  // namespace tessera::data_parallel
