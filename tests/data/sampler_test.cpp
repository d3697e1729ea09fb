// The order of samples depends only on seed, epoch and position.
#include "tessera/data/sampler.h"

#include "tessera/base/error.h"
#include "tessera/data/detail/permutation.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace tessera::data {
namespace {

using Rows = std::vector<int64_t>;

TEST(Permutation, ContainsEachNumberOnce) {
  for (int64_t n = 1; n < 300; n += n < 20 ? 1 : 37) {
    const Permutation order(n, 7);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < n; i++) seen.insert(order(i));
    EXPECT_EQ(static_cast<int64_t>(seen.size()), n);
    EXPECT_EQ(*seen.rbegin(), n - 1);
  }
}

TEST(Permutation, DiffersForEachKey) {
  std::set<Rows> orders;
  for (uint64_t key = 0; key < 50; key++) {
    Rows row;
    for (int64_t i = 0; i < 30; i++) row.push_back(Permutation(30, key)(i));
    orders.insert(row);
    int64_t fixed_points = 0;
    for (int64_t i = 0; i < 30; i++) fixed_points += row[static_cast<size_t>(i)] == i;
    EXPECT_LT(fixed_points, 8);  // one on average
  }
  EXPECT_EQ(orders.size(), 50u);
}

TEST(Permutation, HugeSizesNeedNoMemory) {
  const Permutation order(int64_t{1} << 60, 3);
  EXPECT_NE(order(0), order(1));
  EXPECT_ERROR(UsageError, Permutation(0, 1), "the size of a permutation is 0");
  EXPECT_ERROR(UsageError, Permutation(5, 1)(5), "index 5 of a permutation of size 5");
}

std::vector<GlobalBatch> batches(Sampler& sampler, int count) {
  std::vector<GlobalBatch> all;
  for (int i = 0; i < count; i++) all.push_back(sampler.next());
  return all;
}

TEST(Sampler, RanksReadPartsOfOneGlobalBatch) {
  Sampler sampler({.samples = 100, .batch = 12, .seed = 5});
  const auto batch = sampler.next();
  for (int64_t ranks : {1, 2, 3, 4}) {
    Rows together;
    for (int64_t rank = 0; rank < ranks; rank++) {
      const auto rows = batch.rows_of(rank, ranks);
      EXPECT_EQ(static_cast<int64_t>(rows.size()), 12 / ranks);
      together.insert(together.end(), rows.begin(), rows.end());
    }
    EXPECT_EQ(together, batch.rows) << ranks;
  }
  EXPECT_ERROR(UsageError, batch.rows_of(0, 5), "a batch of 12 samples is not divisible by 5 data-parallel ranks");
}

TEST(Sampler, EachEpochHasAllSamplesInANewOrder) {
  Sampler sampler({.samples = 12, .batch = 4, .seed = 5});
  Rows first, second;
  for (const auto& batch : batches(sampler, 6)) {
    auto& epoch = batch.epoch == 0 ? first : second;
    epoch.insert(epoch.end(), batch.rows.begin(), batch.rows.end());
  }
  EXPECT_NE(first, second);
  std::sort(first.begin(), first.end()), std::sort(second.begin(), second.end());
  EXPECT_EQ(first, (Rows{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(first, second);
}

TEST(Sampler, UnevenLastBatchIsDroppedOrPadded) {
  SamplerOptions options{.samples = 10, .batch = 4, .shuffle = false, .last = LastBatch::Drop};
  Sampler drops(options);
  EXPECT_EQ(batches(drops, 3), (std::vector<GlobalBatch>{{{0, 1, 2, 3}, 0}, {{4, 5, 6, 7}, 0}, {{0, 1, 2, 3}, 1}}));
  EXPECT_EQ(drops.position(), 14);
  options.last = LastBatch::Pad;
  Sampler pads(options);
  const auto three = batches(pads, 4);
  EXPECT_EQ(three[2], (GlobalBatch{{8, 9, kPadding, kPadding}, 0}));
  EXPECT_EQ(three[2].samples(), 2);
  EXPECT_EQ(three[2].rows_of(1, 2), (Rows{kPadding, kPadding}));  // a rank may have only padding
  EXPECT_EQ(three[3], (GlobalBatch{{0, 1, 2, 3}, 1}));
}

TEST(Sampler, ResumesAtAPosition) {
  for (auto last : {LastBatch::Drop, LastBatch::Pad}) {
    const SamplerOptions options{.samples = 10, .batch = 4, .seed = 9, .last = last};
    Sampler uninterrupted(options), before(options), after(options);
    const auto all = batches(uninterrupted, 9);
    auto joined = batches(before, 5);
    after.set_position(before.position());
    for (const auto& batch : batches(after, 4)) joined.push_back(batch);
    EXPECT_EQ(joined, all);
  }
}

TEST(Sampler, EndlessDataIsReadInOrder) {
  Sampler sampler({.batch = 3});
  sampler.set_position(6);
  EXPECT_EQ(sampler.next().rows, (Rows{6, 7, 8}));
}

TEST(Sampler, RejectsABatchThatIsNeverFull) {
  EXPECT_ERROR(UsageError, Sampler({.samples = 3, .batch = 4}), "3 samples, which never fill a batch of 4",
               "use a smaller batch");
  EXPECT_NO_THROW(Sampler({.samples = 3, .batch = 4, .last = LastBatch::Pad}));
  EXPECT_ERROR(UsageError, Sampler({.batch = 0}), "the batch size is 0");
}

}  // namespace
}  // namespace tessera::data
