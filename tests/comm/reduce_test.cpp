// Reductions of raw memory: conversions of 16-bit floats compared with c10, and the order of summation.
#include "tessera/comm/detail/region/reduce.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/region/widen.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

namespace tessera::comm::region {
namespace {

bool same(float a, float b) { return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, 4) == 0; }

template <class T>
void every_value() {
  std::vector<T> all(1 << 16), back(all.size());
  for (size_t i = 0; i < all.size(); i++) all[i] = T(static_cast<uint16_t>(i), T::from_bits());
  std::vector<float> wide(all.size());
  widen(all.data(), wide.data(), static_cast<int64_t>(all.size()));
  narrow(wide.data(), back.data(), static_cast<int64_t>(all.size()));
  for (size_t i = 0; i < all.size(); i++) {
    ASSERT_TRUE(same(wide[i], static_cast<float>(all[i]))) << i;
    ASSERT_TRUE(same(static_cast<float>(back[i]), static_cast<float>(all[i]))) << i;
  }
}
TEST(Widen, EveryValueRoundTrips) {
  every_value<c10::BFloat16>();
  every_value<c10::Half>();
}

template <class T>
void rounds_as_c10() {
  std::mt19937 random(7);
  std::vector<float> in(100'003);
  for (auto& x : in) {
    const uint32_t bits = random() & 0xfffff000u;  // many are exactly between two values
    std::memcpy(&x, &bits, 4);
  }
  in[0] = std::numeric_limits<float>::infinity();
  in[1] = 65520.f;  // rounds up to infinity in float16
  in[2] = 1e-8f;    // underflows to 0 in float16
  std::vector<T> out(in.size());
  narrow(in.data(), out.data(), static_cast<int64_t>(in.size()));
  for (size_t i = 0; i < in.size(); i++)
    ASSERT_TRUE(same(static_cast<float>(out[i]), static_cast<float>(static_cast<T>(in[i])))) << in[i];
}
TEST(Widen, RoundsAsC10Does) {
  rounds_as_c10<c10::BFloat16>();
  rounds_as_c10<c10::Half>();
}

// (1e8 + 1) - 1e8 is 0 in float32, but (1e8 - 1e8) + 1 is 1. So the result shows whether the order is rank by rank.
TEST(Reduce, AddsInRankOrder) {
  const int64_t n = 3001;
  std::vector<float> a(n, 1e8f), b(n, 1.f), c(n, -1e8f), out(n);
  const char* ins[] = {reinterpret_cast<char*>(a.data()), reinterpret_cast<char*>(b.data()),
                       reinterpret_cast<char*>(c.data())};
  reduce(WireOp::Sum, c10::kFloat, reinterpret_cast<char*>(out.data()), ins, n);
  EXPECT_EQ(out, std::vector<float>(n, 0.f));
  reduce(WireOp::Sum, c10::kFloat, reinterpret_cast<char*>(c.data()), ins, n);  // the result may be an input
  EXPECT_EQ(c, out);
}

TEST(Reduce, NanPropagatesThroughMinAndMax) {
  const float nan = std::nanf("");
  for (auto op : {WireOp::Min, WireOp::Max})
    for (bool first : {true, false}) {
      std::vector<float> a(40, first ? nan : 1.f), b(40, first ? 1.f : nan), out(40);
      const char* ins[] = {reinterpret_cast<char*>(a.data()), reinterpret_cast<char*>(b.data())};
      reduce(op, c10::kFloat, reinterpret_cast<char*>(out.data()), ins, 40);
      for (float x : out) EXPECT_TRUE(std::isnan(x)) << first;
    }
}

TEST(Reduce, UndefinedOpsAreRefused) {
  EXPECT_CONTAINS(testing::error_message<UsageError>([] { check_reducible(WireOp::Max, c10::kComplexFloat); }),
                  "cannot reduce ComplexFloat with max");
  EXPECT_CONTAINS(testing::error_message<UsageError>([] { check_reducible(WireOp::BitOr, c10::kFloat); }),
                  "cannot reduce Float with bor");
  EXPECT_CONTAINS(testing::error_message<UsageError>([] { check_reducible(WireOp::Avg, c10::kInt); }), "with avg");
  EXPECT_CONTAINS(testing::error_message<UsageError>([] { check_reducible(static_cast<WireOp>(8), c10::kFloat); }),
                  "with this op");
}

}  // namespace
}  // namespace tessera::comm::region
