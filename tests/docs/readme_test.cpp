// Compiles and runs the blocks of README.md.
#include "docs/fixtures.h"
#include "docs/temporary_folder.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>

#include <iostream>

namespace readme_page {

// The program as a function. Only main() may end without a return.
#define main readme_main
#define int void
#include "readme_1.inc"
#undef int
#undef main

struct BlockImpl : torch::nn::Module {
  ts::nn::Linear linear = register_module("linear", ts::nn::Linear(8, 8));
  at::Tensor forward(const at::Tensor& x) { return x + linear(x).relu(); }
};
TESSERA_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  ts::nn::Linear up = register_module("up", ts::nn::Linear(8, 16)),
                 down = register_module("down", ts::nn::Linear(16, 8));
  ts::nn::ModuleList<Block> h = register_module("h", ts::nn::ModuleList<Block>());
  ModelImpl() { h->push_back(Block()); }
  at::Tensor forward(const at::Tensor& x) { return (*h)[0](down(up(x).relu())); }
};
TESSERA_MODULE(Model);

}  // namespace readme_page

namespace {

TEST(ReadmePage, TheProgramRuns) { readme_page::readme_main(); }

TEST(ReadmePage, TheLinesRun) {
  const TemporaryFolder folder;
  tessera::testing::run_ranks(4, [](tessera::testing::Rank& me) {
    using tessera::docs::train_step;
    namespace ts = tessera;
    const auto mesh = me.mesh("dp=2,tp=2");
    torch::manual_seed(7);
    readme_page::Model model;
    torch::nn::Linear net(8, 8);
    const auto x = torch::randn({4, 8});
#include "readme_2.inc"
    ts::optim::AdamW opt(model->parameters());
    EXPECT_TRUE(step(model, opt, x).defined());
  });
  EXPECT_TRUE(std::filesystem::is_directory("out/step-100"));
}

}  // namespace
