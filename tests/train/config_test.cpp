// TrainConfig: options by name, derived values, and checks.
#include "tessera/train/config.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tessera/train/detail/language_model.h"
#include "tessera/train/detail/train_step.h"

#include <gtest/gtest.h>

#include <sstream>

namespace tessera::train {
namespace {

TrainConfig with(std::initializer_list<std::pair<const char*, const char*>> options) {
  TrainConfig config;
  for (const auto& [key, text] : options) set_option(config, key, text);
  return config;
}

TEST(TrainConfig, OptionsAreSetByName) {
  const auto config = with({{"training.steps", "7"}, {"optimizer.lr", "3e-4"}, {"parallel.fsdp", "true"}});
  EXPECT_EQ(config.training.steps, 7);
  EXPECT_EQ(config.optimizer.lr, 3e-4);
  EXPECT_TRUE(config.parallel.fsdp);
  EXPECT_NE(config, TrainConfig());
  TrainConfig same;
  EXPECT_ERROR(UsageError, set_option(same, "training.step", "7"), "unknown option 'training.step'",
               "'training.steps'");
  EXPECT_ERROR(UsageError, set_option(same, "training.steps", "7x"), "training.steps is '7x'; write an integer");
  EXPECT_ERROR(UsageError, set_option(same, "training.seed", "-1"), "write an integer from 0 to 18446744073709551615");
  EXPECT_ERROR(UsageError, set_option(same, "model.layers", "-3"), "model.layers is '-3'; write an integer from 0 to");
  EXPECT_ERROR(UsageError, set_option(same, "optimizer.decay_share", "0"), "write a number above 0 and at most 1");
  EXPECT_ERROR(UsageError, set_option(same, "optimizer.lr", ""), "optimizer.lr is ''; write a number");
  EXPECT_ERROR(UsageError, set_option(same, "parallel.fsdp", "yes"), "write true or false");
  EXPECT_EQ(same, TrainConfig());
}

TEST(TrainConfig, PrintsToml) {
  const auto text = c10::str(with({{"data.path", "a \"b\".txt"}, {"optimizer.lr", "1"}}));
  EXPECT_CONTAINS(text, "[model]\nname = \"gpt-tiny\"  # ");
  EXPECT_CONTAINS(text, "\n[data]\npath = \"a \\\"b\\\".txt\"  # ");
  EXPECT_CONTAINS(text, "\nlr = 1.0  # ");
  EXPECT_CONTAINS(text, "\nfsdp = false  # ");
}

TEST(TrainConfig, SizesReplaceThoseOfTheNamedModel) {
  const auto gpt =
      std::get<models::GPT2Config>(model_config({.name = "gpt2-124m", .layers = 2, .heads = 8, .dim = 64}));
  EXPECT_EQ(gpt, (models::GPT2Config{.n_layer = 2, .n_head = 8, .n_embd = 64}));
  EXPECT_EQ(std::get<models::LlamaConfig>(model_config({.name = "llama-tiny", .ffn_dim = 100})).ffn_dim, 100);
  EXPECT_ERROR(UsageError, model_config({.name = "gpt-tiny", .ffn_dim = 9}),
               "model.ffn_dim is set, but gpt-tiny has no such option");
  EXPECT_ERROR(UsageError, model_config({.name = "gpt-tiny", .heads = 3}), "n_embd", "n_head");
  EXPECT_ERROR(UsageError, model_config({.name = "gtp-tiny"}), "'gtp-tiny'", "gpt-tiny");
}

std::string mesh(std::initializer_list<std::pair<const char*, const char*>> options, int64_t ranks) {
  return c10::str(mesh_shape(with(options), ranks));
}

TEST(TrainConfig, MeshAxesAreInOrder) {
  EXPECT_EQ(mesh({}, 4), "dp=4");
  EXPECT_EQ(mesh({{"parallel.fsdp", "true"}}, 4), "fsdp=4");
  EXPECT_EQ(mesh({{"parallel.mesh", "tp=2,dp=3"}}, 6), "dp=3,tp=2");
  EXPECT_EQ(mesh({{"parallel.mesh", "dp=2,tp=2"}, {"parallel.fsdp", "true"}}, 4), "fsdp=2,tp=2");
  EXPECT_EQ(mesh({{"parallel.mesh", "dp=2,tp=2"}, {"training.precision", "bf16"}}, 4), "dp=2,fsdp=1,tp=2");
  EXPECT_ERROR(UsageError, mesh({{"parallel.mesh", "2x2"}}, 4), "mesh '2x2' has no axis names");
  EXPECT_ERROR(UsageError, mesh({{"parallel.mesh", "dp=2"}}, 4), "mesh 'dp=2' needs 2 ranks, but there are 4");
  EXPECT_ERROR(UsageError, mesh({{"parallel.mesh", "dp=2,fsdp=2"}, {"parallel.fsdp", "true"}}, 4),
               "has an axis fsdp, and --fsdp renames dp to fsdp");
}

TEST(TrainConfig, CheckRejectsConfigsThatCannotRun) {
  const auto says = [](std::initializer_list<std::pair<const char*, const char*>> options, int64_t ranks,
                       const std::string& part) { EXPECT_ERROR(UsageError, check(with(options), ranks), part); };
  EXPECT_NO_THROW(check(TrainConfig(), 4));
  says({{"optimizer.schedule", "exp"}}, 1, "optimizer.schedule is 'exp'; allowed: constant, cosine, linear, wsd");
  says({{"data.format", "csv"}}, 1, "'csv'");
  says({{"training.steps", "0"}}, 1, "training.steps is '0'; write an integer from 1 to 1000000000");
  says({{"optimizer.lr", "-1"}}, 1, "optimizer.lr is '-1'; write a number from 0 to 1000000");
  says({{"eval.accuracy", "95"}}, 1, "eval.accuracy is '95'; write a number from 0 to 1");
  says({{"data.path", "x"}, {"data.seq_len", "999"}}, 1, "samples have 999 tokens, but gpt-tiny takes at most 256");
  says({{"training.batch", "30"}, {"training.accumulate", "2"}}, 4,
       "a batch of 30 samples is not divisible by 4 data-parallel ranks x 2 accumulation steps; use a multiple of 8");
  says({{"model.name", "gpt2-1558m"}, {"parallel.mesh", "tp=2"}}, 2, "gpt2-1558m has 25 heads, which are not");
  says({{"model.name", "llama-8b"}, {"parallel.mesh", "tp=16"}}, 16,
       "llama-8b has 8 key/value heads, which are not divisible by tp=16; use tp of 1, 2, 4, 8");
  says({{"parallel.mesh", "tp=2"}, {"parallel.tp_plan", "/nowhere"}}, 2, "cannot read the plan file '/nowhere'");
}

TEST(Schedule, WarmsUpAndDecaysToMinFactor) {
  const auto factors = [](const std::string& schedule) {
    const auto factor =
        learning_rate_factor({.schedule = schedule, .warmup = 3, .min_factor = 0.1, .decay_share = 0.2}, 20);
    return std::vector<double>{factor(0), factor(2), factor(3), factor(12), factor(19)};
  };
  const auto expect = [&](const std::string& schedule, double late, double last) {
    const auto f = factors(schedule);
    EXPECT_EQ(f[0], 0.25) << schedule;  // not 0: the first step must have an effect
    EXPECT_EQ(f[1], 0.75) << schedule;
    EXPECT_EQ(f[2], 1) << schedule;
    EXPECT_NEAR(f[3], late, 1e-9) << schedule;
    EXPECT_NEAR(f[4], last, 1e-9) << schedule;
  };
  expect("constant", 1, 1);
  expect("wsd", 1, 0.1);
  expect("linear", 1 - 0.9 * 9 / 16, 0.1);
  expect("cosine", 0.1 + 0.9 * (1 + std::cos(M_PI * 9 / 16)) / 2, 0.1);
}

TEST(Flops, MatchLlmC) {
  const auto config = models::find_config("gpt2-124m");
  EXPECT_NEAR(flops_per_token(config, 1024), 6 * (124439808 - 1024 * 768) + 6.0 * 12 * 768 * 1024, 1);
}

}  // namespace
}  // namespace tessera::train
