// PyTorch's test of data-parallel compilation of a train step, under its name: two processes with shm and with gloo.
// The original runs the compiled step once. Here it runs three times, and collectives and placements are checked.
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/state/load_state_dict.h"
#include "tessera/state/state_dict.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/spawn.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using comm::CommKind;
using testing::close;
using testing::Rank;

struct SimpleMLPImpl : torch::nn::Module {
  nn::Linear net1{nullptr}, net2{nullptr};
  SimpleMLPImpl() {
    net1 = register_module("net1", nn::Linear(50, 32));
    net2 = register_module("net2", nn::Linear(32, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::sigmoid(net2(torch::relu(net1(x)))); }
};
TESSERA_MODULE(SimpleMLP);

// Applies flatten, squeeze, unsqueeze and view to the batch dim, and adds factories with and without the batch dim.
struct BatchDimsImpl : torch::nn::Module {
  SimpleMLP mlp{nullptr};
  BatchDimsImpl() { mlp = register_module("mlp", SimpleMLP()); }
  at::Tensor forward(const at::Tensor& x) {
    auto output = mlp(x);
    const auto unsqueezed = output.clone().view(-1).squeeze().unsqueeze(0);
    output = output + 0.1 * unsqueezed.view({output.size(0), -1});
    const auto added = torch::arange(output.size(1)).unsqueeze(0) + torch::ones(output.sizes());
    const auto repeated = torch::zeros(output.size(1)).unsqueeze(0).repeat({output.size(0), 1});
    return output + added + repeated;
  }
};
TESSERA_MODULE(BatchDims);

// The batch is dim 1 of input and output.
struct BatchIsDim1Impl : torch::nn::Module {
  SimpleMLP mlp{nullptr};
  BatchIsDim1Impl() { mlp = register_module("mlp", SimpleMLP()); }
  at::Tensor forward(const at::Tensor& x) { return mlp(x.t().contiguous()).t(); }
};
TESSERA_MODULE(BatchIsDim1);

using Batch = std::tuple<at::Tensor, at::Tensor>;

const auto train_step = [](auto& model, auto& optim, const Batch& batch) {
  optim.zero_grad();
  const auto& [inputs, labels] = batch;
  auto loss = (model(inputs) - labels).sum();
  loss.backward();
  optim.step();
  return loss;
};

struct SpmdCase {
  const char* mode;
  int64_t input_batch_dim = 0;
  bool different_data = false;  // on every rank
};

template <class H, class Optimizer>
void test_data_parallel(Rank& me, const typename Optimizer::Options& config, const SpmdCase& c) {
  torch::manual_seed(1234);
  H mod, copy;
  load_state_dict(*copy, state_dict(*mod));
  DistributedDataParallel ddp(copy);
  Optimizer opt(mod->parameters(), config), ddp_opt(ddp->parameters(), config);
  const auto batch_of = [&] {
    return c.input_batch_dim == 0 ? Batch{torch::randn({128, 50}), torch::randn({128, 8})}
                                  : Batch{torch::randn({50, 128}), torch::randn({8, 128})};
  };
  auto batch = batch_of();
  train_step(mod, opt, batch);
  opt.zero_grad();
  train_step(ddp, ddp_opt, batch);
  ddp_opt.zero_grad();

  if (c.different_data) torch::manual_seed(77 + me.rank);
  auto step = compile(train_step, {.parallel_mode = DataParallel(c.mode, {.input_batch_dim = c.input_batch_dim})});
  const bool sharded = std::string(c.mode) == "fully_shard";
  for (int call = 0; call < 3; call++) {
    if (c.different_data) batch = batch_of();
    ddp_opt.zero_grad();
    const auto wanted = (ddp(std::get<0>(batch)) - std::get<1>(batch)).sum();
    wanted.backward();
    ddp_opt.step();
    at::Tensor found;
    CommDebugMode mode;
    found = step(mod, opt, batch);
    if (call > 0) {
      EXPECT_EQ(mode.get_comm_counts().of(CommKind::AllReduce, comm::Family::C10d), sharded ? 0 : 4);  // in place
      EXPECT_EQ(mode.get_comm_counts().of(CommKind::AllGatherIntoTensor), sharded ? 4 : 0);
      EXPECT_EQ(mode.get_comm_counts().of(CommKind::ReduceScatterTensor), sharded ? 4 : 0);
      EXPECT_EQ(mode.get_total_counts(), sharded ? 8 : 4);
    }
    EXPECT_EQ(close(found, wanted.detach()), "") << "the local loss, call " << call;
    const auto parameters = mod->parameters(), reference = ddp->parameters();
    ASSERT_EQ(parameters.size(), 4u);
    for (size_t i = 0; i < parameters.size(); i++) {
      ASSERT_TRUE(is_dtensor(parameters[i])) << i;
      const DTensor p(parameters[i].detach());
      EXPECT_EQ(p.placements()[0], sharded ? Shard(0) : Replicate()) << i;
      EXPECT_EQ(close(p.full_tensor(), reference[i].detach()), "") << i << ", call " << call;
    }
  }
  EXPECT_EQ(step.cache().size(), 1u);
}

using SGDOptions = optim::SGD::Options;
const SGDOptions kSgd[] = {{.lr = 0.1, .foreach = false},
                           {.lr = 0.1, .momentum = 0.9, .foreach = false},
                           {.lr = 0.1, .momentum = 0.9, .foreach = true}};
const optim::Adam::Options kAdamFused{.lr = 0.1, .fused = true};

TEST(DataParallelTest, test_replicate_sgd) {
  testing::spawn_ranks_over_each(2, [](Rank& me) {
    for (const auto& config : kSgd) test_data_parallel<SimpleMLP, optim::SGD>(me, config, {"replicate"});
  });
}

TEST(DataParallelTest, test_replicate_adam_fused) {
  testing::spawn_ranks_over_each(
      2, [](Rank& me) { test_data_parallel<SimpleMLP, optim::Adam>(me, kAdamFused, {"replicate"}); });
}

TEST(DataParallelTest, test_fully_shard_sgd) {
  testing::spawn_ranks_over_each(2, [](Rank& me) {
    for (const auto& config : kSgd) test_data_parallel<SimpleMLP, optim::SGD>(me, config, {"fully_shard"});
  });
}

TEST(DataParallelTest, test_fully_shard_adam_fused) {
  testing::spawn_ranks_over_each(
      2, [](Rank& me) { test_data_parallel<SimpleMLP, optim::Adam>(me, kAdamFused, {"fully_shard"}); });
}

TEST(DataParallelTest, test_data_parallel_batch_dim_analysis) {
  testing::spawn_ranks_over_each(2, [](Rank& me) {
    for (const char* mode : {"replicate", "fully_shard"})
      test_data_parallel<BatchDims, optim::SGD>(me, kSgd[0], {mode});
  });
}

TEST(DataParallelTest, test_fully_shard_non_0_batch_dim) {
  testing::spawn_ranks_over_each(2, [](Rank& me) {
    test_data_parallel<BatchIsDim1, optim::Adam>(me, kAdamFused, {"fully_shard", 1});
  });
}

// In the original all ranks have the same data, so it cannot detect a missing reduction.
TEST(DataParallelTest, OtherDataOnEveryRank) {
  testing::spawn_ranks_over_each(2, [](Rank& me) {
    for (const char* mode : {"replicate", "fully_shard"})
      test_data_parallel<SimpleMLP, optim::SGD>(me, kSgd[1], {mode, 0, true});
  });
}

}  // namespace
}  // namespace tessera
