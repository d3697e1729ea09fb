// Data and tensor parallelism on a 2 x 2 mesh: parameters and gradients are DTensors before and after, and equal to
// what one rank computes from the global batch.
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/sizes.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/state/load_state_dict.h"
#include "tessera/state/optimizer_state.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/data_parallel.h"
#include "tests/fixtures/full_tensor.h"
#include "tests/fixtures/transformers.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;
using comm::CommKind;

constexpr testing::Tolerance kTensorParallelTolerance{1e-4, 1e-5};
// Local shards of odd size: 22 features over two tp ranks.
const auto kLlama = [] {
  auto config = kTinyLlama;
  config.ffn_dim = 22;
  return config;
}();

TokenBatch seeded_batch() {
  torch::manual_seed(8);
  return random_tokens();
}

template <class Model, class Config>
Model made(const Config& config) {
  torch::manual_seed(7);
  Model model(config);
  fill_uniform(*model);
  return model;
}

std::string layout(const at::Tensor& t) {
  return is_dtensor(t) ? DTensor(t).spec().describe() : c10::str("plain ", t.sizes());
}
// Every parameter and gradient keeps its name and placements and has the plain module's values.
void expect_equal(const Module& parallel, const Module& plain, const std::vector<std::string>& placements) {
  const auto found = parallel.named_parameters(), wanted = plain.named_parameters();
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); i++) {
    const auto& name = wanted[i].key();
    EXPECT_TRUE(found[i].key().ends_with(name)) << found[i].key();
    EXPECT_EQ(layout(found[i].value()), placements[i]) << name;
    EXPECT_EQ(layout(found[i].value().grad()), placements[i]) << name;
    EXPECT_EQ(close(full_value(found[i].value().detach()), wanted[i].value().detach(), kTensorParallelTolerance), "")
        << name;
    EXPECT_EQ(close(full_value(found[i].value().grad()), wanted[i].value().grad(), kTensorParallelTolerance), "")
        << name << ".grad";
  }
}

struct How {
  bool sequence_parallel;
  bool gradient_as_bucket_view = false, static_graph = false;
};

template <class Model, class Config>
void train(const Config& config, const How& how) {
  const auto start = made<Model>(config);
  const auto batch = seeded_batch();
  run_ranks(4, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    auto plain = clone(start), model = clone(start);
    parallelize_module(model, mesh["tp"], tensor_parallel_plan(config, {.sequence_parallel = how.sequence_parallel}));
    std::vector<std::string> placements;
    for (const auto& p : model->parameters()) placements.push_back(layout(p));
    DistributedDataParallel ddp(model, {.device_mesh = mesh["dp"],
                                        .gradient_as_bucket_view = how.gradient_as_bucket_view,
                                        .static_graph = how.static_graph});
    optim::SGD plain_opt(plain->parameters(), {.lr = 0.1}), opt(ddp->parameters(), {.lr = 0.1});
    const auto half = [&](const at::Tensor& t) { return t.chunk(2)[mesh.get_local_rank("dp")]; };
    for (int step = 0; step < 3; step++) {
      opt.zero_grad();
      plain_opt.zero_grad();
      models::loss(plain(batch.tokens), batch.targets).backward();
      auto loss = models::loss(ddp(half(batch.tokens)), half(batch.targets));
      CommDebugMode comm;
      loss.backward();
      EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllReduce, comm::Family::C10d), 1) << "over dp";
      expect_equal(*ddp, *plain, placements);
      plain_opt.step();
      comm.reset();
      opt.step();
      EXPECT_EQ(comm.get_total_counts(), 0) << "every gradient has its parameter's placements";
    }
  });
}

TEST(DataAndTensorParallel, Gpt2) { train<models::GPT2>(kTinyGPT2FourHeads, {.sequence_parallel = false}); }
TEST(DataAndTensorParallel, Gpt2WithSequenceParallelism) {
  train<models::GPT2>(kTinyGPT2FourHeads, {.sequence_parallel = true});
}
TEST(DataAndTensorParallel, LlamaWithSequenceParallelismInBucketViews) {
  train<models::Llama>(kLlama, {.sequence_parallel = true, .gradient_as_bucket_view = true, .static_graph = true});
}

// Two pairs of a column-wise and a row-wise layer under replicate, as in the test of replicate with a compiler.
TEST(DataAndTensorParallel, Replicate) {
  const models::MLP start(models::four_linears(12));
  const auto data = batches(2, {1, 12});
  run_ranks(4, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    auto plain = clone(start), model = clone(start);
    parallelize_module(model, mesh["tp"],
                       {{"fc1", ColwiseParallel()},
                        {"fc2", RowwiseParallel()},
                        {"fc3", ColwiseParallel()},
                        {"fc4", RowwiseParallel()}});
    std::vector<std::string> placements;
    for (const auto& p : model->parameters()) placements.push_back(layout(p));
    replicate(model, {{.device_mesh = mesh["dp"]}});
    {
      const torch::NoGradGuard no_grad;
      model(data[0]);  // broadcasts the parameters
    }
    CommDebugMode comm;
    auto loss = model(data[static_cast<size_t>(mesh.get_local_rank("dp"))]).sum();
    EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllReduce), 2);
    EXPECT_EQ(comm.get_total_counts(), 2);
    comm.reset();
    loss.backward();
    EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllReduce), 1);  // the gradient of fc3's input, over tp
    EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllReduce, comm::Family::C10d), 1);
    for (const auto& batch : data) (plain(batch).sum() * 0.5).backward();
    expect_equal(*model, *plain, placements);
  });
}

// A model and optimizer that are saved and loaded into another model continue training in the same way.
TEST(DataAndTensorParallel, ContinuesTrainingAfterSaveAndLoad) {
  const models::MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(4, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    const auto parallel = [&](const DDPOptions& options) {
      auto model = clone(start);
      parallelize_module(model, mesh["tp"], {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
      return DistributedDataParallel(model, options);
    };
    const auto& batch = data[static_cast<size_t>(mesh.get_local_rank("dp"))];
    auto first = parallel({.device_mesh = mesh["dp"]});
    optim::AdamW first_opt(first->parameters(), {.lr = 0.1});
    const auto step = [&](auto& ddp, auto& opt) {
      opt.zero_grad();
      ddp(batch).pow(2).mean().backward();
      opt.step();
    };
    for (int i = 0; i < 2; i++) step(first, first_opt);

    auto second = parallel({.device_mesh = mesh["dp"], .gradient_as_bucket_view = true});
    optim::AdamW second_opt(second->parameters(), {.lr = 0.5});
    EXPECT_EQ(state_dict(*first).names()[0], "module.net1.weight");
    load_state_dict(*second, state_dict(*first));
    load_optimizer_state_dict(second_opt, *second, optimizer_state_dict(first_opt, *first));
    for (int i = 0; i < 2; i++) {
      step(first, first_opt);
      step(second, second_opt);
    }
    const auto found = second->parameters(), wanted = first->parameters();
    for (size_t i = 0; i < found.size(); i++)
      EXPECT_EQ(close(full_value(found[i].detach()), full_value(wanted[i].detach()), {0, 0}), "");
  });
}

}  // namespace
}  // namespace tessera
