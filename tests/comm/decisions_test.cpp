// Decisions that all ranks take together.
#include "tessera/base/error.h"
#include "tessera/comm/collectives.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

TEST(Decisions, AllRanksGetTheSameAnswer) {
  for (const int64_t n : {1, 2, 3})
    testing::run_ranks(n, [&](testing::Rank& me) {
      const bool last = me.rank == n - 1;
      EXPECT_TRUE(any_rank(last));
      EXPECT_EQ(all_ranks(last), n == 1);
      EXPECT_FALSE(any_rank(false));
      EXPECT_TRUE(all_ranks(true));
      EXPECT_DOUBLE_EQ(mean_over_ranks(static_cast<double>(me.rank)), static_cast<double>(n - 1) / 2);
      const auto x = torch::full({2}, static_cast<double>(me.rank), torch::requires_grad());
      const auto mean = mean_over_ranks(x);
      EXPECT_TRUE(torch::allclose(mean, torch::full({2}, static_cast<double>(n - 1) / 2)));
      EXPECT_FALSE(mean.requires_grad());
      EXPECT_EQ(x[0].item<double>(), static_cast<double>(me.rank));
      EXPECT_ERROR(UsageError, mean_over_ranks(torch::ones(2, torch::kLong)), "floating-point", "Long");
    });
}

}  // namespace
}  // namespace tessera
