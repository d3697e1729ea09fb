// Compiles and runs the blocks of docs/own_schedule.md.
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <tessera/train.h>
#include <torch/torch.h>

namespace {

namespace ts = tessera;

TEST(OwnSchedulePage, BlocksRun) {
  ts::testing::run_ranks(2, [](ts::testing::Rank& me) {
    const auto mesh = me.mesh("pp=2");
    const ts::models::GPT2Config config{.vocab_size = 16, .max_seq_len = 4, .n_layer = 2, .n_head = 2, .n_embd = 8};
    torch::manual_seed(7);
    ts::models::GPT2 model(config);
    auto split = ts::pipelining::split_evenly(ts::models::pipeline_layers(model), 2);
    auto stages = ts::pipelining::build_stages(*model, split, "1F1B", mesh["pp"]);
    const auto tokens = torch::arange(12).view({3, 4}), targets = tokens + 1;
    std::string message;
#include "own_schedule_1.inc"
#include "own_schedule_2.inc"
    EXPECT_EQ(losses.size(), me.rank == 1 ? 3u : 0u);
    EXPECT_NE(all.find("0SEND_F0"), std::string::npos) << all;
#include "own_schedule_3.inc"
    EXPECT_NE(message, "");
  });
}

}  // namespace
