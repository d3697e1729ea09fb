#include "tessera/base/nearest.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using Names = std::vector<std::string>;

TEST(Nearest, BestFirstAndEqualsInTheOrderGiven) {
  const Names names = {"norm", "layers.1.wq", "layers.0.wk", "layers.0.wq"};
  EXPECT_EQ(nearest("layer.0.wq", names), (Names{"layers.0.wq", "layers.1.wq", "layers.0.wk"}));
  EXPECT_EQ(nearest("layer.0.wq", names, 1), (Names{"layers.0.wq"}));
}

TEST(Nearest, ASwapIsOneEdit) {
  EXPECT_EQ(nearest("attetnion", Names{"attention_x", "attention"}), (Names{"attention", "attention_x"}));
  EXPECT_EQ(nearest("qw", Names{"kw", "wq"}), (Names{"kw", "wq"}));  // one edit each
  EXPECT_EQ(nearest("abcd", Names{"abxy", "bacd"}, 1), (Names{"bacd"}));
}

TEST(Nearest, WhatIsMostlyDifferentIsNoSuggestion) {
  EXPECT_TRUE(nearest("wq", Names{"embedding", "output"}).empty());
  EXPECT_TRUE(nearest("wq", Names{}).empty());
  EXPECT_TRUE(nearest("", Names{"a"}).empty());
}

}  // namespace
}  // namespace tessera
