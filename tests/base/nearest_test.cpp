#include "tessera/base/detail/nearest_names.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using Names = std::vector<std::string>;

TEST(Nearest, BestFirstAndTiesInGivenOrder) {
  const Names names = {"norm", "layers.1.wq", "layers.0.wk", "layers.0.wq"};
  EXPECT_EQ(nearest_names("layer.0.wq", names), (Names{"layers.0.wq", "layers.1.wq", "layers.0.wk"}));
  EXPECT_EQ(nearest_names("layer.0.wq", names, 1), (Names{"layers.0.wq"}));
}

TEST(Nearest, VeryDifferentNamesAreNotSuggested) {
  EXPECT_TRUE(nearest_names("wq", {"embedding", "output"}).empty());
  EXPECT_TRUE(nearest_names("wq", {}).empty());
  EXPECT_TRUE(nearest_names("", {"a"}).empty());
}

TEST(Nearest, DidYouMeanListsTheNames) {
  EXPECT_EQ(did_you_mean("wq", {"wk", "norm"}), "did you mean 'wk'?");
  EXPECT_EQ(did_you_mean("wqx", {"wq", "wqy", "wqz"}), "did you mean 'wq', 'wqy' or 'wqz'?");
  EXPECT_EQ(did_you_mean("wq", {"norm"}), "");
}

}  // namespace
}  // namespace tessera
