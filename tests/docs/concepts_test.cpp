// Compiles and runs the blocks of docs/concepts.md. Ranks are threads.
#include "docs/temporary_folder.h"
#include "tessera/rules/detail/elementwise.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <tessera/train.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <iostream>
#include <mutex>

namespace concepts_page {

namespace ts = tessera;
using ts::testing::Rank;
using ts::testing::run_ranks;

struct AttentionImpl : torch::nn::Module {
  ts::nn::Linear wq = register_module("wq", ts::nn::Linear(8, 8)), wk = register_module("wk", ts::nn::Linear(8, 8)),
                 wv = register_module("wv", ts::nn::Linear(8, 8)), wo = register_module("wo", ts::nn::Linear(8, 8));
  at::Tensor forward(const at::Tensor& x) { return wo(wq(x) * wk(x) + wv(x)); }
};
TESSERA_MODULE(Attention);
struct LayerImpl : torch::nn::Module {
  ts::nn::LayerNorm attention_norm = register_module("attention_norm", ts::nn::LayerNorm(std::vector<int64_t>{8}));
  Attention attention = register_module("attention", Attention());
  at::Tensor forward(const at::Tensor& x) { return attention(attention_norm(x)); }
};
TESSERA_MODULE(Layer);
struct NormedImpl : torch::nn::Module {
  ts::nn::ModuleList<Layer> layers = register_module("layers", ts::nn::ModuleList<Layer>());
  NormedImpl() { layers->push_back(Layer()); }
  at::Tensor forward(const at::Tensor& x) { return (*layers)[0](x); }
};
TESSERA_MODULE(Normed);
struct UpImpl : torch::nn::Module {
  ts::nn::Linear up = register_module("up", ts::nn::Linear(4, 4));
  at::Tensor forward(const at::Tensor& x) { return up(x); }
};
TESSERA_MODULE(Up);

ts::models::GPT2Config tiny() { return {.vocab_size = 16, .max_seq_len = 4, .n_layer = 2, .n_head = 2, .n_embd = 8}; }

TEST(ConceptsPage, WorldAndMesh) {
  run_ranks(8, [](Rank&) {
    auto x = torch::ones({2});
#include "concepts_1.inc"
    EXPECT_EQ(tp.size(), 4);
    EXPECT_EQ(x.sum().item<double>(), 4);
  });
}

TEST(ConceptsPage, TheTensor) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=1");
    const auto weight = torch::ones({6, 4}), local = torch::ones({3, 4});
    const at::Tensor x = ts::ones({3, 4}, mesh);
    torch::nn::Linear linear(4, 4);
#include "concepts_2.inc"
    EXPECT_EQ(ts::DTensor(y).full_tensor().sum().item<double>(), 72);
  });
}

TEST(ConceptsPage, RedistributeAndCommPolicy) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=1");
    const ts::DTensor y = ts::ones({4, 4}, mesh, {ts::Shard(0), ts::Replicate()});
#include "concepts_3.inc"
#include "concepts_4.inc"
    EXPECT_EQ(full.to_local().size(0), 4);
  });
}

TEST(ConceptsPage, CountAndExplain) {
  run_ranks(2, [](Rank& me) {
    static std::mutex one_at_a_time;
    const auto mesh = me.mesh("tp=2");
    const ts::DTensor x = ts::ones({4, 4}, mesh), w = ts::ones({4, 4}, mesh, {ts::Shard(1)});
    const auto step = [&] { torch::mm(x, w); };
    std::ostringstream page;
    const std::lock_guard lock(one_at_a_time);
    auto* before = std::cout.rdbuf(page.rdbuf());
#include "concepts_5.inc"
    std::cout.rdbuf(before);
    EXPECT_NE(page.str().find("aten::mm"), std::string::npos) << page.str();
  });
}

TORCH_LIBRARY(my, m) {
  m.def("scale_rows(Tensor x, Tensor by) -> Tensor");
  m.def("scale_rows_too(Tensor x, Tensor by) -> Tensor");
  m.def("swish(Tensor x) -> Tensor");
}

TEST(ConceptsPage, ARuleForYourOwnOp){
#include "concepts_6.inc"
#include "concepts_7.inc"
}

TEST(ConceptsPage, LocalMap) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const at::Tensor x = ts::ones({4, 4}, mesh, {ts::Shard(1)}), w = ts::ones({4, 4}, mesh, {ts::Shard(0)});
#include "concepts_8.inc"
    EXPECT_EQ(ts::DTensor(y).full_tensor()[0][0].item<double>(), 4);
  });
}

namespace hooks {
#include "concepts_10.inc"
}  // namespace hooks

TEST(ConceptsPage, ModulesAndHooks) {
  Up model;
  const auto x = torch::ones({2, 4}), plain = model(x);
#include "concepts_9.inc"
  EXPECT_TRUE(model(x).equal(plain));
  hooks::Batch batch{x, x};
  int fields = 0;
  tessera_visit(batch, [&](at::Tensor&) { fields++; });
  EXPECT_EQ(fields, 2);
}

// One rank: the part of a plan on the page leaves the output sharded along the sequence.
TEST(ConceptsPage, TensorParallelism) {
  run_ranks(1, [](Rank& me) {
    const auto mesh = me.mesh("tp=1");
    torch::manual_seed(7);
    Normed model;
    const at::Tensor tokens = ts::distribute_tensor(torch::randn({2, 4, 8}), mesh, {ts::Shard(1)});
#include "concepts_11.inc"
    EXPECT_TRUE(model(tokens).defined());
  });
}

TEST(ConceptsPage, FullyShardedDataParallelism) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("fsdp=2");
    torch::manual_seed(7);
    ts::models::GPT2 model(tiny());
#include "concepts_12.inc"
    EXPECT_TRUE(ts::is_dtensor(model->parameters()[0]));
  });
}

TEST(ConceptsPage, Pipeline) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("pp=2");
    const auto config = tiny();
    ts::manual_seed(7);
    const auto tokens = torch::zeros({8, 4}, torch::kLong), targets = tokens;
#include "concepts_13.inc"
    EXPECT_EQ(losses.size(), me.rank == 1 ? 8u : 0u);
  });
}

struct Batch {
  torch::Tensor tokens, targets;
  friend void tessera_visit(Batch& b, auto&& field) { field(b.tokens), field(b.targets); }
};

TEST(ConceptsPage, Compile) {
  ts::models::GPT2 model(tiny());
  ts::optim::AdamW opt(model->parameters());
  const Batch batch{torch::zeros({2, 4}, torch::kLong), torch::zeros({2, 4}, torch::kLong)};
#include "concepts_14.inc"
  EXPECT_TRUE(loss.defined());
}

TEST(ConceptsPage, Checkpoints) {
  const TemporaryFolder folder;
  run_ranks(2, [](Rank& me) {
    torch::manual_seed(7);
    ts::models::GPT2 model(tiny());
    ts::optim::AdamW optimizer(model->parameters());
    const auto train_step = [] {};
    const int64_t steps = 200;
#include "concepts_15.inc"
#include "concepts_16.inc"
    if (me.rank == 0) {
      std::vector<std::pair<std::string, at::Tensor>> file;
      for (const auto& [name, tensor] : parameters) file.emplace_back("transformer." + name, tensor);
      ts::dcp::write_safetensors("gpt.safetensors", file);
    }
    me.group()->barrier().wait();
#include "concepts_17.inc"
    EXPECT_TRUE(report.missing.empty());
  });
  EXPECT_EQ(ts::dcp::steps_in("out").size(), 3u);
}

}  // namespace concepts_page
