#include "tessera/data_parallel/detail/buckets.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <numeric>
#include <sstream>

namespace tessera::data_parallel {
namespace {

std::string text(const Buckets& buckets) {
  std::ostringstream out;
  out << buckets;
  return out.str();
}

std::vector<BucketItem> floats(std::vector<int64_t> bytes) {
  std::vector<BucketItem> items;
  for (const auto each : bytes) items.push_back({.bytes = each});
  return items;
}

TEST(Buckets, AreFilledToTheLimitOneAfterTheOther) {
  const auto items = floats({4, 4, 4, 4, 4, 4, 4});
  EXPECT_EQ(text(fill_buckets(items, {0, 1, 2, 3, 4, 5, 6}, {8, 16})), "{0 1} {2 3 4 5} {6}");
  EXPECT_EQ(text(fill_buckets(items, {6, 5, 4, 3, 2, 1, 0}, {8, 16})), "{6 5} {4 3 2 1} {0}");
}

TEST(Buckets, AnItemLargerThanTheLimitClosesItsBucket) {
  EXPECT_EQ(text(fill_buckets(floats({2, 100, 2, 2}), {0, 1, 2, 3}, {8, 16})), "{0 1} {2 3}");
}

TEST(Buckets, EachDtypeAndDeviceHasItsOwnBuckets) {
  auto items = floats({4, 4, 4, 4, 4, 4});
  items[1].dtype = items[3].dtype = items[5].dtype = c10::kBFloat16;
  EXPECT_EQ(text(fill_buckets(items, {0, 1, 2, 3, 4, 5}, {8, 8})), "{0 2} {1 3} {4} {5}");
  items[4].device = c10::Device(c10::kCUDA, 1);
  EXPECT_EQ(text(fill_buckets(items, {0, 1, 2, 3, 4, 5}, {8, 8})), "{0 2} {1 3} {5} {4}");
}

TEST(Buckets, SparseGradientsHaveTheirOwnBucket) {
  auto items = floats({4, 4, 4});
  items[1].alone = true;
  EXPECT_EQ(text(fill_buckets(items, {0, 1, 2}, {8, 8})), "{1} {0 2}");
}

TEST(Buckets, HaveEveryItemOnceAndPyTorchsDefaultLimits) {
  const auto items = floats(std::vector<int64_t>(100, 1 << 19));  // 100 items of 0.5 MiB
  const auto buckets = fill_buckets(items, first_to_last(100));
  ASSERT_EQ(buckets.size(), 3u);
  EXPECT_EQ(buckets[0].size(), 2u);   // 1 MiB
  EXPECT_EQ(buckets[1].size(), 50u);  // 25 MiB
  EXPECT_EQ(buckets[2].size(), 48u);
  EXPECT_EQ(text(fill_buckets({}, {})), "");
  EXPECT_ERROR(UsageError, fill_buckets(items, {}, {0, 1}), "at least one byte");
}

}  // namespace
}  // namespace tessera::data_parallel
