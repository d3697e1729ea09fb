// The generator behind random.h: random words, values of distributions, and the indices of a local tensor.
#include "tessera/dtensor/detail/philox.h"

#include "tessera/dtensor/detail/distributions.h"
#include "tessera/dtensor/detail/local_indices.h"
#include "tessera/placement/detail/shard.h"

#include <ATen/core/PhiloxRNGEngine.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace tessera {
namespace {

template <class D>
std::vector<typename D::Value> values(const D& distribution, int64_t first, int64_t n, philox::Stream stream = {7, 3}) {
  std::vector<typename D::Value> out(n);
  philox::fill(stream, distribution, first, n, out.data());
  return out;
}

TEST(Philox, KnownAnswers) {  // from the test vectors of Random123, philox4x32 with 10 rounds
  const auto block = [](uint64_t seed, uint64_t offset, uint64_t number) {
    std::vector<uint32_t> words(4);
    philox::make_blocks({seed, offset}, number, 1, words.data());
    return words;
  };
  EXPECT_EQ(block(0, 0, 0), (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(block(~0ull, ~0ull, ~0ull), (std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(block(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
            (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, WordsEqualLibTorchs) {
  const philox::Stream stream{0x123456789abcdefull, 0xfedcba9876543ull};
  const auto words = values(philox::Word(), 0, 1000, stream);
  at::Philox4_32 engine(stream.seed, stream.offset, 0);
  for (size_t i = 0; i < words.size(); i++) ASSERT_EQ(words[i], engine()) << i;
}

TEST(Philox, CountersBeyond32Bits) {
  const int64_t far = (int64_t{1} << 34) + 5;
  const auto words = values(philox::Word(), far, 9);
  at::Philox4_32 engine(7, 3, static_cast<uint64_t>(far) >> 2);
  engine();  // lane 0; far is lane 1
  for (auto word : words) EXPECT_EQ(word, engine());
  EXPECT_NE(words, values(philox::Word(), 5, 9));
}

// An element has the same value, whatever range it is computed in.
template <class D>
void check_any_start(const D& distribution) {
  const auto all = values(distribution, 0, 300);
  for (int64_t first : {0, 1, 2, 3, 4, 5, 31, 63, 64, 65, 130})
    for (int64_t n : {1, 2, 3, 4, 7, 64, 65, 129, 170}) {
      const auto part = values(distribution, first, n);
      for (int64_t i = 0; i < n; i++)
        ASSERT_EQ(part[i], all[first + i]) << "first " << first << " n " << n << " i " << i;
    }
}

TEST(Philox, AnElementDependsOnItsIndexAlone) {
  check_any_start(philox::Uniform<float>(-1, 2));
  check_any_start(philox::Uniform<double>(-1, 2));
  check_any_start(philox::Uniform<c10::BFloat16>(-1, 2));
  check_any_start(philox::Normal<float>(1, 2));
  check_any_start(philox::Normal<double>(1, 2));
  check_any_start(philox::Normal<c10::Half>(1, 2));
  check_any_start(philox::LogNormal<float>(0, 1));
  check_any_start(philox::Exponential<float>(2));
  check_any_start(philox::Cauchy<double>(0, 1));
  check_any_start(philox::Geometric<int64_t>(0.3));
  check_any_start(philox::Bernoulli<uint8_t>(0.3));
  check_any_start(philox::Integer32<int64_t>{5, 10});
  check_any_start(philox::Integer64<int64_t>{-5, uint64_t{1} << 40});
}

template <class R>
void check_functions(double tolerance) {
  for (int i = 1; i < 20000; i++) {
    const R u = static_cast<R>(i) / R(20000);
    EXPECT_NEAR(philox::log(u), std::log(static_cast<long double>(u)), tolerance * std::fmax(1, -std::log(u)));
    const auto [sin, cos] = philox::sin_cos_2pi(u);
    const long double angle = 2 * M_PIl * static_cast<long double>(u);
    EXPECT_NEAR(sin, std::sin(angle), 8 * tolerance);
    EXPECT_NEAR(cos, std::cos(angle), 8 * tolerance);
    const R x = 40 * u - 20;
    EXPECT_NEAR(philox::exp(x) / std::exp(static_cast<long double>(x)), 1, 40 * tolerance);
  }
  EXPECT_EQ(philox::log(R(1)), 0);
  EXPECT_NEAR(philox::log(static_cast<R>(1e-30)), std::log(1e-30L), 100 * tolerance);
}

TEST(Distributions, FunctionsAreAccurate) {
  check_functions<float>(1.2e-7);
  check_functions<double>(4e-16);
}

struct Moments {
  double mean = 0, variance = 0, least = INFINITY, most = -INFINITY;
};
template <class T>
Moments moments(const std::vector<T>& values) {
  Moments m;
  for (auto v : values) {
    m.mean += static_cast<double>(v);
    m.least = std::fmin(m.least, static_cast<double>(v));
    m.most = std::fmax(m.most, static_cast<double>(v));
  }
  m.mean /= static_cast<double>(values.size());
  for (auto v : values) m.variance += (static_cast<double>(v) - m.mean) * (static_cast<double>(v) - m.mean);
  m.variance /= static_cast<double>(values.size());
  return m;
}

// Of 2^20 draws; the tolerances are five standard errors or more.
template <class D>
Moments sample(const D& distribution) {
  return moments(values(distribution, 0, 1 << 20));
}

TEST(Distributions, MomentsAreRight) {
  for (auto m : {sample(philox::Uniform<float>(2, 6)), sample(philox::Uniform<double>(2, 6)),
                 sample(philox::Uniform<c10::Half>(2, 6))}) {
    EXPECT_NEAR(m.mean, 4, 0.01);
    EXPECT_NEAR(m.variance, 16. / 12, 0.01);
    EXPECT_GE(m.least, 2);
    EXPECT_LT(m.most, 6);
  }
  for (auto m : {sample(philox::Normal<float>(1, 2)), sample(philox::Normal<double>(1, 2)),
                 sample(philox::Normal<c10::BFloat16>(1, 2))}) {
    EXPECT_NEAR(m.mean, 1, 0.01);
    EXPECT_NEAR(m.variance, 4, 0.04);
    EXPECT_GT(m.most, 1 + 2 * 4);  // the tails exist
    EXPECT_LT(m.least, 1 - 2 * 4);
  }
  EXPECT_NEAR(sample(philox::Exponential<float>(4)).mean, 0.25, 0.002);
  EXPECT_GT(sample(philox::Exponential<float>(4)).least, 0);
  EXPECT_NEAR(sample(philox::LogNormal<float>(0, 0.5)).mean, std::exp(0.125), 0.005);
  EXPECT_NEAR(sample(philox::Geometric<int64_t>(0.25)).mean, 4, 0.02);
  EXPECT_EQ(sample(philox::Geometric<int64_t>(0.25)).least, 1);
  EXPECT_NEAR(sample(philox::Bernoulli<float>(0.3)).mean, 0.3, 0.003);
  EXPECT_EQ(sample(philox::Bernoulli<float>(1)).mean, 1);
  const auto integers = sample(philox::Integer32<int64_t>{-3, 7});
  EXPECT_NEAR(integers.mean, 0, 0.02);
  EXPECT_EQ(integers.least, -3);
  EXPECT_EQ(integers.most, 3);
  auto cauchy = values(philox::Cauchy<float>(5, 2), 0, 1 << 20);
  std::sort(cauchy.begin(), cauchy.end());
  EXPECT_NEAR(cauchy[1 << 19], 5, 0.02);      // the median
  EXPECT_NEAR(cauchy[3 << 18], 5 + 2, 0.03);  // the upper quartile is at median + sigma
}

TEST(Distributions, UniformNeverReachesItsUpperBound) {
  const uint32_t ones[] = {~0u, ~0u};
  c10::BFloat16 b;
  philox::Uniform<c10::BFloat16>(0, 1)(ones, &b);
  EXPECT_LT(static_cast<float>(b), 1);
  EXPECT_GT(static_cast<float>(b), 0.99);
  c10::Half h;
  philox::Uniform<c10::Half>(0, 0.1)(ones, &h);
  EXPECT_LT(static_cast<float>(h), 0.1);
  float f;
  philox::Uniform<float>(1e6, 1e6 + 1)(ones, &f);
  EXPECT_LT(f, 1e6f + 1);
  philox::Uniform<float>(3, 3)(ones, &f);
  EXPECT_EQ(f, 3);
}

TEST(Distributions, FillsAreIndependent) {
  const auto correlation = [](const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += a[i] * b[i];
    return sum / static_cast<double>(a.size());
  };
  const int64_t n = 1 << 18;  // a standard error of 0.002
  const philox::Normal<double> normal(0, 1);
  const auto base = values(normal, 0, n, {1, 0});
  EXPECT_NEAR(correlation(base, base), 1, 0.02);
  EXPECT_NEAR(correlation(base, values(normal, 0, n, {1, 1})), 0, 0.01);
  EXPECT_NEAR(correlation(base, values(normal, 0, n, {2, 0})), 0, 0.01);
  EXPECT_NEAR(correlation(base, values(normal, 1, n, {1, 0})), 0, 0.01);
}

TEST(LocalIndices, TheExampleInItsHeader) {
  const std::vector<int64_t> sizes{4, 6}, ranges{1, 0, 2, 2, 0, 1, 3, 4};
  const LocalIndices local(sizes, ranges);
  std::vector<int64_t> indices;
  local.for_each_range(0, local.numel(), [&](int64_t, int64_t index, int64_t count) {
    for (int64_t i = 0; i < count; i++) indices.push_back(index + i);
  });
  EXPECT_EQ(indices, (std::vector<int64_t>{0, 3, 6, 9}));
}

// Compares with the definition: the elements in row-major order, with the indices of each dim one by one.
RC_GTEST_PROP(LocalIndices, MatchTheRangesOfEachDim, ()) {
  const auto ndim = *rc::gen::inRange(1, 4);
  std::vector<int64_t> sizes, ranges;
  std::vector<std::vector<int64_t>> indices;
  for (int d = 0; d < ndim; d++) {
    sizes.push_back(*rc::gen::inRange<int64_t>(1, 8));
    const auto shard = *rc::gen::element(Shard(0), Shard(0, 2), StridedShard(0, 2), StridedShard(0, 3));
    const auto n = *rc::gen::inRange<int64_t>(1, 4), rank = *rc::gen::inRange<int64_t>(0, n);
    indices.emplace_back();
    const auto mine = shard_ranges(shard, sizes[d], n, rank);
    ranges.push_back(static_cast<int64_t>(mine.size()));
    for (const auto& range : mine) {
      ranges.insert(ranges.end(), {range.begin, range.end});
      for (int64_t i = range.begin; i < range.end; i++) indices[d].push_back(i);
    }
  }
  std::vector<int64_t> expected{0};
  for (int d = 0; d < ndim; d++) {
    std::vector<int64_t> next;
    for (auto base : expected)
      for (auto i : indices[d]) next.push_back(base * sizes[d] + i);
    expected = next;
  }
  const LocalIndices local(sizes, ranges);
  RC_ASSERT(local.numel() == static_cast<int64_t>(expected.size()));
  const auto begin = *rc::gen::inRange<int64_t>(0, local.numel() + 1),
             end = *rc::gen::inRange<int64_t>(begin, local.numel() + 1);
  std::vector<int64_t> found;
  local.for_each_range(begin, end, [&](int64_t position, int64_t index, int64_t count) {
    RC_ASSERT(position == begin + static_cast<int64_t>(found.size()));
    for (int64_t i = 0; i < count; i++) found.push_back(index + i);
  });
  RC_ASSERT(found == std::vector<int64_t>(expected.begin() + begin, expected.begin() + end));
}

}  // namespace
}  // namespace tessera
