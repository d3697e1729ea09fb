// all_gather and reduce_scatter between one tensor per rank and segments of several tensors. Small ones, and ones that
// are sent in chunks whose borders differ from those of the segments.
#include "tessera/comm/detail/segments.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/records.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace tessera::comm {
namespace {

using testing::Rank;
using testing::run_ranks;

struct Kinds : Observer {
  std::vector<CommKind> kinds;
  void on_post(const Record& record) override {
    if (record.counted()) kinds.push_back(record.kind);
  }
};

// Two tensors, of 2 k n and of 3 k elements. Each rank has 2 k elements of the first, and up to 2 k of the second, as
// long as there are any left.
struct ShardedPair {
  int64_t n, k;
  int64_t second(int64_t rank) const { return std::clamp<int64_t>(3 * k - 2 * k * rank, 0, 2 * k); }
  Segments segments() const {
    Segments all;
    for (int64_t r = 0; r < n; r++)
      all.push_back(
          {{0, 2 * k * r, 2 * k}, {1, std::min(2 * k * r, 3 * k), second(r)}, {kPaddingSegment, 0, 2 * k - second(r)}});
    return all;
  }
};

void check(Rank& me, int64_t k) {
  const ShardedPair pair{me.size(), k};
  const auto number = [&](int64_t size, int64_t rank, double from) {
    return at::arange(static_cast<double>(size)).add_(from + 1e4 * static_cast<double>(rank)).to(at::kFloat);
  };
  std::vector<at::Tensor> firsts, seconds;  // the inputs of each rank
  for (int64_t r = 0; r < me.size(); r++) {
    firsts.push_back(number(2 * k, r, 0.5));
    seconds.push_back(number(pair.second(r), r, 0.25));
  }
  const auto mine = static_cast<size_t>(me.rank);
  const auto nothing = at::zeros({2 * k - pair.second(me.rank)});

  Kinds posted;
  const ObserverScope observed(&posted);
  std::vector<at::Tensor> outs{at::full({2 * k * me.size()}, -1.0),
                               at::full({std::min(me.size() * 2, int64_t{3}) * k}, -1.0)};
  Segments segments = pair.segments();
  all_gather_into_segments(me.group(), outs, segments, at::cat({firsts[mine], seconds[mine], nothing})).wait();
  EXPECT_TRUE(outs[0].equal(at::cat(firsts)));
  EXPECT_TRUE(outs[1].equal(at::cat(seconds)));

  const double factor = static_cast<double>(me.rank + 1);  // 1 + 2 + ... over all ranks
  const auto all = static_cast<double>(me.size() * (me.size() + 1) / 2);
  at::Tensor part = at::full({4 * k}, -1.0);
  reduce_scatter_segments(me.group(), part, {outs[0].mul(factor), outs[1].mul(factor)}, segments, ReduceOp::Sum).wait();
  EXPECT_TRUE(part.equal(at::cat({firsts[mine].mul(all), seconds[mine].mul(all), nothing})));
  EXPECT_EQ(posted.kinds, (std::vector{CommKind::AllGatherIntoTensor, CommKind::ReduceScatterTensor}));
}

TEST(Segments, AllGatherAndReduceScatter) {
  for (const int64_t n : {2, 3, 4})
    for (const int64_t k : {1, 7, 1001, 100003}) run_ranks(n, [&](Rank& me) { check(me, k); });
}

TEST(Segments, AreCopiedForABackendWithoutSegmentCollectives) {
  run_ranks(2, [&](Rank& me) { check(me, 7); }, {.backend = "gloo"});
}

TEST(Segments, BadSegmentsAreRefused) {
  run_ranks(2, [](Rank& me) {
    const std::vector<at::Tensor> outs{at::zeros({4})};
    const auto gather = [&](const Segments& segments) {
      all_gather_into_segments(me.group(), outs, segments, at::zeros({2}));
    };
    EXPECT_ERROR(UsageError, gather({{{0, 0, 2}}}), "segments for 1 ranks of 2");
    EXPECT_ERROR(UsageError, gather({{{0, 0, 2}}, {{0, 3, 2}}}), "elements 3 to 5 of tensor 0, which does not exist");
    EXPECT_ERROR(UsageError, gather({{{0, 0, 2}}, {{0, 2, 1}}}),
                 "segments of a rank have 1 elements, and its part has 2");
  });
}

}  // namespace
}  // namespace tessera::comm
