// The examples of the API reference that introduce a header.
#include "docs/temporary_folder.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <tessera/train.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <fstream>
#include <iostream>

namespace tessera::docs_introductions {
namespace {

namespace ts = tessera;
using ts::testing::Rank;
using ts::testing::run_ranks;

struct MyMpiBackend : c10d::Backend {
  MyMpiBackend(c10::intrusive_ptr<c10d::Store>, int rank, int size) : Backend(rank, size) {}
  const std::string getBackendName() const override { return "mpi"; }
};

TEST(ApiIntroductions, Backends) {
  // example: tessera/comm/backends.h
  ts::comm::register_backend("mpi", [](const ts::comm::ConnectOptions& o) {
    return c10::make_intrusive<MyMpiBackend>(o.store, o.rank, o.size);  // derives from c10d::Backend
  });
  ts::init({.backend = "mpi"});
  // end
  EXPECT_EQ(ts::get_world_size(), 1);
  ts::destroy();
}

TEST(ApiIntroductions, Funcol) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    const auto x = torch::ones({2});
    // example: tessera/comm/functional_collectives.h
    at::Tensor sum = ts::funcol::all_reduce(x, ts::ReduceOp::Sum, mesh.get_group("dp"));
    const auto y = x.exp();  // runs while the collective is in flight
    ts::funcol::wait(sum, mesh.get_group("dp"));
    // end
    EXPECT_EQ(sum[0].item<double>(), 2);
  });
}

TEST(ApiIntroductions, CompileOptions) {
  const auto train_step = [](const at::Tensor& x) { return x + 1; };
  // example: tessera/compile/api/options.h
  auto step =
      compile(train_step, {.passes = PassList{"dead_code", "merge_collectives(bytes=1048576)"}, .fullgraph = false});
  // end
  EXPECT_EQ(step(torch::ones({1})).item<double>(), 2);
}

TEST(ApiIntroductions, Data) {
  const TemporaryFolder here;
  std::vector<uint16_t> tokens(20'000);
  for (size_t i = 0; i < tokens.size(); i++) tokens[i] = static_cast<uint16_t>(i % 1000);
  std::vector<int32_t> header(256, 0);
  header[0] = 20240520, header[1] = 1, header[2] = static_cast<int32_t>(tokens.size());
  std::ofstream out("train.bin", std::ios::binary);
  out.write(reinterpret_cast<const char*>(header.data()), static_cast<std::streamsize>(header.size() * 4));
  out.write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(tokens.size() * 2));
  out.close();
  // example: tessera/data/token_file.h
  auto file = std::make_shared<data::TokenFile>("train.bin");
  auto [training, held_out] = data::token_windows(file, {.length = 256, .vocab_size = 50257});
  // end
  EXPECT_GT(training->samples(), held_out->samples());
  run_ranks(2, [](Rank& me) {
    ts::nn::Linear model(4, 4);
    ts::optim::SGD optimizer(model->parameters(), {.lr = 0.1});
    auto dataset = torch::data::datasets::TensorDataset(torch::ones({64, 4}))
                       .map(torch::data::transforms::Stack<torch::data::TensorExample>());
    // example: tessera/data/data_loader.h
    auto loader = ts::data::make_data_loader(std::move(dataset), 64);  // was torch::data::make_data_loader
    for (auto& batch : *loader) EXPECT_EQ(batch.data.size(0), 32);     // 64 / ranks samples on each rank
    ts::TrainingState state{model, optimizer, *loader};
    // end
  });
}

TEST(ApiIntroductions, CommHook) {
  run_ranks(2, [](Rank&) {
    DistributedDataParallel ddp{ts::nn::Linear(4, 4)};
    // example: tessera/data_parallel/comm_hook.h
    ddp->register_comm_hook(nullptr, bf16_compress_hook);  // nullptr: DDP's own group
    // end
    ddp(torch::ones({1, 4})).sum().backward();
  });
}

TEST(ApiIntroductions, Models) {
  using namespace ts::models;
  const auto tokens = torch::zeros({1, 4}, torch::kLong);
  {
    // example: tessera/models/gpt2.h
    GPT2 model(GPT2Config{.n_layer = 4, .n_head = 4, .n_embd = 128});
    auto logits = model(tokens);
    // end
    EXPECT_EQ(logits.dim(), 3);
  }
  const auto of_a_llama = [&] {
    // example: tessera/models/llama.h
    Llama model(std::get<LlamaConfig>(find_config("llama-1b")));
    auto logits = model(tokens);
    // end
    return logits;
  };
  (void)of_a_llama;  // is compiled; to run it takes 5 GB
  // example: tessera/models/mlp.h
  MLP model(mlp_module());
  // end
  EXPECT_EQ(model->layers.size(), 2);
}

// example: tessera/nn/holder.h
struct FeedForwardImpl : torch::nn::Cloneable<FeedForwardImpl> {
  FeedForwardImpl() { reset(); }
  void reset() override { up = register_module("up", tessera::nn::Linear(8, 32)); }
  torch::Tensor forward(torch::Tensor x);
  tessera::nn::Linear up{nullptr};
};
TESSERA_MODULE(FeedForward);  // instead of TORCH_MODULE(FeedForward)
// end

torch::Tensor FeedForwardImpl::forward(torch::Tensor x) { return up(x); }

TEST(ApiIntroductions, Nn) {
  EXPECT_EQ(FeedForward()(torch::ones({1, 8})).size(1), 32);
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    using GPT = ts::models::GPT2;
    const ts::models::GPT2Config config{.vocab_size = 16, .max_seq_len = 4, .n_layer = 1, .n_head = 2, .n_embd = 8};
    // example: tessera/nn/deferred_init.h
    auto model = deferred_init([&] { return GPT(config); });
    for (auto& parameter : model->parameters()) distribute_in_place(parameter, mesh, {Shard(0)});  // no communication
    materialize(model);
    // end
    EXPECT_FALSE(ts::is_deferred(model->wte->weight));
  });
}

TEST(ApiIntroductions, Optim) {
  ts::nn::Linear model(4, 4);
  ts::optim::SGD opt(model->parameters(), {.lr = 0.1});
  const int64_t total_steps = 100;
  model(torch::ones({1, 4})).sum().backward();
  // example: tessera/optim/clip_grad.h
  auto norm = optim::clip_grad_norm_(model->parameters(), 1.0);
  // end
  EXPECT_GT(norm.item<double>(), 0);
  {
    // example: tessera/optim/schedulers.h
    optim::CosineAnnealingLR schedule(opt, total_steps, 1e-5);
    // end
  }
  // example: tessera/optim/schedulers.h
  optim::LambdaLR schedule(opt, optim::cosine_with_warmup(100, 10'000));
  // end
}

TEST(ApiIntroductions, Pipelining) {
  run_ranks(4, [](Rank& me) {
    const auto mesh = me.mesh("pp=4");
    torch::manual_seed(7);
    const auto input = torch::ones({8, 4}), target = torch::zeros({8, 4});
    const auto loss_fn = [](const at::Tensor& output, const at::Tensor& target) {
      return torch::mse_loss(output, target);
    };
    // example: tessera/pipelining/schedule.h
    nn::Sequential model = nn::Sequential(nn::Linear(4, 4), nn::Linear(4, 4), nn::Linear(4, 4), nn::Linear(4, 4));
    auto split = pipelining::split_evenly(pipelining::layers_of(model), 4);
    auto stages = pipelining::build_stages(*model, split, "1F1B", mesh["pp"]);
    pipelining::Schedule1F1B schedule(stages, /*n_microbatches=*/8, loss_fn, mesh["pp"]);
    auto losses = schedule.step(input, target);  // accumulates gradients; then step the optimizer
    // end
    EXPECT_EQ(losses.size(), me.rank == 3 ? 8 : 0);
  });
}

TEST(ApiIntroductions, ContextParallel) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("cp=2");
    ts::models::GPT2 model(
        ts::models::GPT2Config{.vocab_size = 16, .max_seq_len = 8, .n_layer = 1, .n_head = 2, .n_embd = 8});
    const auto tokens = torch::zeros({1, 8}, torch::kLong), targets = tokens;
    // example: tessera/tensor_parallel/context_parallel.h
    ContextParallel cp(mesh["cp"]);                          // in this scope and thread
    auto logits = model(cp.shard(tokens, 1));                // (B, T / n) tokens
    auto loss = models::loss(logits, cp.shard(targets, 1));  // over the tokens of this rank
    loss.backward();                                         // then average gradients over cp, as over dp
    // end
    EXPECT_EQ(logits.size(1), 4);
  });
}

TEST(ApiIntroductions, TrainConfig) {
  using namespace ts::train;
  // example: tessera/train/config.h
  TrainConfig config;
  config.model.name = "gpt2-124m";
  set_option(config, "parallel.mesh", "dp=2,tp=2");
  check(config, 4);
  // end
}

}  // namespace
}  // namespace tessera::docs_introductions
