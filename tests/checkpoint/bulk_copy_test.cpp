// bulk_copy has the values and the version of copy_, for any size, alignment, dtype and strides.
#include "tessera/checkpoint/detail/bulk_copy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::dcp {
namespace {

TEST(BulkCopy, HasTheValuesOfCopy) {
  constexpr int64_t kSize = 300'000;  // floats: more than stays in the caches
  const auto source = at::arange(kSize + 40, at::kFloat);
  for (const int64_t size : {int64_t{0}, int64_t{5}, int64_t{262'144}, int64_t{262'161}, kSize})
    for (const int64_t shift : {0, 1, 3, 16}) {
      const auto from = source.narrow(0, 17, size);
      auto memory = at::full({size + 32}, -1.F);
      bulk_copy(memory.narrow(0, shift, size), from);
      EXPECT_TRUE(memory.narrow(0, shift, size).equal(from)) << size << " from " << shift;
      EXPECT_TRUE(memory.narrow(0, 0, shift).eq(-1).all().item<bool>()) << "before";
      EXPECT_TRUE(memory.narrow(0, shift + size, 32 - shift).eq(-1).all().item<bool>()) << "after";
    }
}

TEST(BulkCopy, ConvertsAndKeepsStrides) {
  const auto from = at::arange(1'000'000, at::kFloat).view({1000, 1000});
  auto transposed = at::zeros({1000, 1000}).t();
  auto doubles = at::zeros({1000, 1000}, at::kDouble), columns = at::zeros({1000, 2000}).narrow(1, 0, 1000);
  auto expanded = at::zeros({2, 1000, 1000});
  for (const auto& to : {transposed, doubles, columns, expanded}) {
    bulk_copy(to, from);
    EXPECT_TRUE(to.eq(from).all().item<bool>());
  }
}

// Autograd must notice that a saved tensor was changed.
TEST(BulkCopy, CountsAsAWrite) {
  auto x = at::ones({1'000'000}), w = at::ones({1'000'000}).requires_grad_();
  const auto loss = (w * x).sum();
  const int64_t before = x._version();
  bulk_copy(x, at::zeros({1'000'000}));
  EXPECT_EQ(x._version(), before + 1);
  EXPECT_THROW(loss.backward(), c10::Error);
}

}  // namespace
}  // namespace tessera::dcp
