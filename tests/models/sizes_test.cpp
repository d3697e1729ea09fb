#include "tessera/models/sizes.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <map>

namespace tessera::models {
namespace {

using testing::error_message;

TEST(Sizes, ParameterCountsAreThePublishedOnes) {
  const std::map<std::string, int64_t> expected{
      {"gpt2-124m", 124'439'808},    {"gpt2-350m", 354'823'168},    {"gpt2-774m", 774'030'080},
      {"gpt2-1558m", 1'557'611'200}, {"llama-1b", 1'235'814'400},   {"llama-3b", 3'212'749'824},
      {"llama-8b", 8'030'261'248},   {"llama-70b", 70'553'706'496}, {"mixtral-8x7b", 46'702'792'704},
  };
  for (const auto& [name, count] : expected) EXPECT_EQ(parameter_count(find_config(name)), count) << name;
}

TEST(Sizes, AllConfigurationsAreValid) {
  for (const auto& size : all_sizes()) std::visit([](const auto& c) { check(c); }, size.config);
}

TEST(Sizes, AnUnknownNameThrowsWithSuggestions) {
  EXPECT_CONTAINS(error_message<UsageError>([] { find_config("gpt2-124"); }),
                  "unknown model 'gpt2-124'; did you mean 'gpt2-124m'");
  EXPECT_CONTAINS(error_message<UsageError>([] { find_config("?"); }), "models are: gpt-tiny, gpt2-124m");
}

TEST(Config, CheckThrowsForInvalidFields) {
  EXPECT_CONTAINS(error_message<UsageError>([] { check(GPT2Config{.n_head = 5, .n_embd = 12}); }),
                  "n_embd 12 is not a multiple of n_head 5, in GPT2(");
  EXPECT_CONTAINS(error_message<UsageError>([] { check(GPT2Config{.dropout = 1}); }), "dropout is 1");
  EXPECT_CONTAINS(error_message<UsageError>([] { check(LlamaConfig{.n_heads = 6, .n_kv_heads = 4, .dim = 24}); }),
                  "n_heads 6 is not a multiple of n_kv_heads 4");
  EXPECT_CONTAINS(error_message<UsageError>([] { check(LlamaConfig{.n_heads = 8, .dim = 24}); }), "2 x n_heads");
  EXPECT_CONTAINS(error_message<UsageError>([] { check(LlamaConfig{.n_layers = 0}); }), "n_layers is 0");
  EXPECT_CONTAINS(error_message<UsageError>([] { check(LlamaConfig{.moe = {.n_experts = 2, .top_k = 3}}); }),
                  "top_k is 3 and must be in 1 to n_experts 2");
}

}  // namespace
}  // namespace tessera::models
