// A training that is saved in the middle of an epoch and continued, on the same and on another number of ranks.
#include "tessera/checkpoint/training_state.h"

#include "tessera/base/error.h"
#include "tessera/data/data_loader.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/schedulers.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include "new_folder.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <optional>
#include <sstream>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;

struct Points : torch::data::datasets::Dataset<Points> {
  torch::data::Example<> get(size_t index) override {
    auto x = torch::sin(torch::arange(6) * (1 + 0.37 * static_cast<double>(index)));
    return {x, x.slice(0, 0, 2).cos()};
  }
  torch::optional<size_t> size() const override { return 28; }
};

struct DigitNetImpl : torch::nn::Module {
  DigitNetImpl() {
    up = register_module("up", torch::nn::Linear(6, 9));
    norm = register_module("norm", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(9).affine(false)));
    down = register_module("down", torch::nn::Linear(9, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) { return down(torch::tanh(up(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};  // its buffers are saved
};
TESSERA_MODULE(DigitNet);

// Equal values on all ranks: ranks that are threads share LibTorch's generator.
DigitNet make_digit_net(double shift = 0) {
  DigitNet net;
  const torch::NoGradGuard no_grad;
  for (auto& p : net->parameters())
    p.copy_((torch::sin(torch::arange(p.numel()) * 1.7 + static_cast<double>(p.numel()) + shift) * 0.4).view_as(p));
  return net;
}

using Losses = std::map<int64_t, double>;
enum class Parallelism { DDP, FullyShard };

// Trains up to `steps`, continues from `folder` if there is a checkpoint, and saves when `save_at` is reached. Batches
// of 8 from 28 samples: the last batch of an epoch has 4, one for each of up to four ranks.
Losses train_until(int64_t steps, int64_t save_at, const std::string& folder, Parallelism parallelism, Rank& me) {
  auto net = make_digit_net();
  std::optional<DistributedDataParallel<DigitNet>> ddp;
  if (parallelism == Parallelism::DDP)
    ddp.emplace(net);
  else
    fully_shard(net, {.mesh = me.mesh({me.size()}, {"fsdp"})});
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.02).amsgrad(true));
  torch::optim::StepLR scheduler(optimizer, 4, 0.8);
  torch::optim::ReduceLROnPlateauScheduler plateau(optimizer, torch::optim::ReduceLROnPlateauScheduler::min, 0.9F, 2);
  auto loader = data::make_data_loader(Points().map(torch::data::transforms::Stack<>()), 8, /*seed=*/3);
  TrainingState state{net, optimizer, scheduler, plateau, loader};
  state.load(folder);
  Losses losses;
  for (; state.step < steps; state.epoch++)
    for (auto& batch : *loader) {
      if (state.step == steps) break;
      optimizer.zero_grad();
      auto loss = torch::mse_loss(ddp ? (*ddp)(batch.data) : net(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      scheduler.step();
      losses[state.step] = mean_over_ranks(loss).item<double>();
      plateau.step(static_cast<float>(losses[state.step]));
      if (++state.step == save_at) {
        state.values["best"] = 0.5;
        state.save(folder);
      }
    }
  EXPECT_TRUE(state.step <= save_at || std::get<double>(state.values.at("best")) == 0.5);
  return losses;
}

void expect_continues(const Losses& continued, const Losses& reference, int64_t first, double tolerance) {
  EXPECT_EQ(continued.begin()->first, first);
  for (const auto& [step, loss] : continued) EXPECT_NEAR(loss, reference.at(step), tolerance) << "step " << step;
}

TEST(TrainingState, ContinuesInTheMiddleOfAnEpoch) {
  for (const auto parallelism : {Parallelism::DDP, Parallelism::FullyShard})
    for (const int64_t save_at : {5, 8, 17}) {  // 8: after the last batch of an epoch
      const dcp::NewFolder reference_folder, folder;
      std::vector<Losses> reference(2);
      run_ranks(2, [&](Rank& me) {
        reference[me.rank] = train_until(20, 20, reference_folder.path(), parallelism, me);
        train_until(save_at, save_at, folder.path(), parallelism, me);
        expect_continues(train_until(20, save_at, folder.path(), parallelism, me), reference[me.rank], save_at, 0);
      });
      for (const int64_t n : {1, 4})
        run_ranks(n, [&](Rank& me) {
          const auto other = parallelism == Parallelism::DDP ? Parallelism::FullyShard : Parallelism::DDP;
          expect_continues(train_until(20, save_at, folder.path(), other, me), reference[0], save_at, 1e-5);
        });
    }
}

// An optimizer with parameters of two modules, a scheduler of tessera::optim and a generator of the user.
TEST(TrainingState, SeveralModulesAndGenerators) {
  const dcp::NewFolder folder;
  run_ranks(2, [&](Rank& me) {
    double reference = 0;
    for (const bool continued : {false, true}) {
      auto first = make_digit_net(), second = make_digit_net(1);
      fully_shard(first, {.mesh = me.mesh({2}, {"fsdp"})});
      auto parameters = first->parameters();
      for (const auto& p : second->parameters()) parameters.push_back(p);
      optim::AdamW optimizer(parameters, {.lr = 0.05});
      optim::ExponentialLR scheduler(optimizer, 0.9);
      auto generator = at::make_generator<at::CPUGeneratorImpl>(continued ? 1 : 17);
      TrainingState state{first, second, optimizer, scheduler, generator};
      EXPECT_EQ(state.load(folder.path()), continued);
      EXPECT_EQ(state.step, continued ? 3 : 0);
      double loss = 0;
      while (state.step < 6) {
        optimizer.zero_grad();
        auto x = torch::randn({4, 6}, generator);
        auto out = (first(x) + second(x)).pow(2).mean();
        out.backward();
        optimizer.step();
        scheduler.step();
        loss = out.item<double>();
        if (++state.step == 3) state.save(folder.path());
      }
      EXPECT_TRUE(!continued || loss == reference) << loss << " " << reference;
      reference = loss;
    }
  });
  run_ranks(1, [&](Rank&) {
    DigitNet first;
    optim::AdamW optimizer(first->parameters());
    TrainingState state{first, optimizer};
    EXPECT_ERROR(UsageError, state.load(folder.path()), "missing from the checkpoint: up.weight", folder.path());
    auto loader = data::make_data_loader(Points(), 2);
    TrainingState with_loader{first, optimizer, loader};
    EXPECT_ERROR(UsageError, with_loader.load(folder.path()), "position_0", "same parts");
    EXPECT_FALSE(state.load(folder.path() + "/nothing"));
  });
}

TEST(TrainingState, OneProcessIsBitEqualWithDropout) {
  const dcp::NewFolder folder;
  run_ranks(1, [&](Rank&) {
    std::map<int64_t, double> reference;
    for (const bool continued : {false, true}) {
      torch::manual_seed(continued ? 99 : 5);
      DigitNet net;
      optim::AdamW optimizer(net->parameters(), {.lr = 0.05});
      auto generator = at::make_generator<at::CPUGeneratorImpl>(continued ? 1 : 17);
      TrainingState state{net, optimizer, generator};
      EXPECT_EQ(state.load(folder.path()), continued);
      EXPECT_EQ(state.step, continued ? 3 : 0);
      while (state.step < 6) {
        optimizer.zero_grad();
        auto loss = torch::dropout(net(torch::randn({4, 6}, generator)), 0.5, true).pow(2).mean();
        loss.backward();
        optimizer.step();
        const auto value = loss.item<double>();
        if (!continued) reference[state.step] = value;
        EXPECT_EQ(value, reference.at(state.step));
        if (++state.step == 3) state.save(folder.path());
      }
    }
  });
}

// Every optimizer of torch::optim and tessera::optim, saved on two ranks, continued on two and on one.
TEST(TrainingState, EveryOptimizerContinues) {
  namespace to = torch::optim;
  using Make = std::function<std::unique_ptr<to::Optimizer>(std::vector<at::Tensor>)>;
  const auto with = [](auto kind, auto options) -> Make {
    using Kind = typename decltype(kind)::type;
    return [options](std::vector<at::Tensor> p) { return std::make_unique<Kind>(std::move(p), options); };
  };
  const std::vector<std::pair<const char*, Make>> all = {
      {"torch SGD", with(std::type_identity<to::SGD>(), to::SGDOptions(0.1).momentum(0.9))},
      {"torch Adam", with(std::type_identity<to::Adam>(), to::AdamOptions(0.02).amsgrad(true))},
      {"torch AdamW", with(std::type_identity<to::AdamW>(), to::AdamWOptions(0.02))},
      {"torch RMSprop", with(std::type_identity<to::RMSprop>(), to::RMSpropOptions(0.005).momentum(0.5))},
      {"torch Adagrad", with(std::type_identity<to::Adagrad>(), to::AdagradOptions(0.1).lr_decay(0.1))},
      {"torch LBFGS", with(std::type_identity<to::LBFGS>(), to::LBFGSOptions(0.5).max_iter(3))},
      {"SGD", with(std::type_identity<optim::SGD>(), optim::SGDOptions{.lr = 0.1, .momentum = 0.9})},
      {"Adam", with(std::type_identity<optim::Adam>(), optim::AdamOptions{.lr = 0.02})},
      {"RMSprop", with(std::type_identity<optim::RMSprop>(), optim::RMSpropOptions{.lr = 0.005, .momentum = 0.5})},
      {"Adagrad", with(std::type_identity<optim::Adagrad>(), optim::AdagradOptions{.lr = 0.1, .lr_decay = 0.1})},
  };
  for (const auto& [name, make] : all) {
    const dcp::NewFolder folder;
    std::map<int64_t, double> reference;
    const auto train = [&, &name = name, &make = make](Rank& me, bool continued, double tolerance) {
      auto net = make_digit_net();
      fully_shard(net, {.mesh = me.mesh({me.size()}, {"fsdp"})});
      const auto optimizer = make(net->parameters());
      TrainingState state{net, optimizer};
      EXPECT_EQ(state.load(folder.path()), continued) << name;
      while (state.step < 6) {
        const auto x = torch::sin(torch::arange(48).view({8, 6}) * (0.3 + 0.1 * static_cast<double>(state.step)));
        const auto mine = x.chunk(me.size())[static_cast<size_t>(me.rank)];
        const auto loss = optimizer->step([&] {
          optimizer->zero_grad();
          auto one = torch::mse_loss(net(mine), mine.slice(1, 0, 2).cos());
          one.backward();
          return mean_over_ranks(one);
        });
        const auto value = loss.item<double>();
        if (!continued && me.rank == 0) reference[state.step] = value;
        if (continued) {
          EXPECT_NEAR(value, reference.at(state.step), tolerance) << name << state.step;
        }
        if (++state.step == 3) state.save(folder.path());
      }
    };
    run_ranks(2, [&](Rank& me) { train(me, false, 0); });
    run_ranks(2, [&](Rank& me) { train(me, true, 0); });
    run_ranks(1, [&](Rank& me) { train(me, true, 1e-5); });
  }
}

TEST(TrainingState, TorchSaveAndLoadOfAShardedModel) {
  const dcp::NewFolder folder;
  const auto file = folder.path() + "/model.pt";
  const auto expected = make_digit_net();
  run_ranks(2, [&](Rank& me) {
    auto sharded = make_digit_net();
    fully_shard(sharded, {.mesh = me.mesh({2}, {"fsdp"})});
    DistributedDataParallel ddp(clone(expected, [] { return DigitNet(); }));
    torch_save(sharded, file);
    torch_save(ddp, folder.path() + "/ddp.pt");
    for (auto& p : sharded->parameters()) p.detach().zero_();
    torch_load(sharded, file);
    const auto weight = DTensor(sharded->up->weight.detach()).full_tensor();
    EXPECT_TRUE(torch::equal(weight, expected->up->weight));
    EXPECT_ERROR(UsageError, torch_load(sharded, folder.path() + "/no.pt"), "no.pt", "does not exist");
    std::stringstream text;
    EXPECT_ERROR(UsageError, torch::save(sharded, text), "'up.weight' of DigitNet", "S(0)", "ts::torch_save",
                 "ts::TrainingState");
  });
  for (const auto* name : {"/model.pt", "/ddp.pt"}) {
    DigitNet plain;  // with another seed
    torch::load(plain, folder.path() + name);
    for (const auto& item : plain->named_parameters())
      EXPECT_TRUE(torch::equal(item.value(), expected->named_parameters()[item.key()])) << item.key();
    EXPECT_TRUE(torch::equal(plain->norm->running_mean, expected->norm->running_mean));
  }
}

// A module of TORCH_MODULE has no Tessera code that torch::save could call.
struct UnhookedNetImpl : torch::nn::Module {
  UnhookedNetImpl() { linear = register_module("linear", torch::nn::Linear(4, 4)); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(UnhookedNet);

TEST(TrainingState, TorchSaveOfAShardedTorchModuleNamesTheCall) {
  run_ranks(2, [](Rank& me) {
    UnhookedNet net;
    fully_shard(net, {.mesh = me.mesh({2}, {"fsdp"})});
    std::stringstream text;
    EXPECT_ERROR(c10::Error, torch::save(net, text), "distributed parameters", "ts::torch_save(model, path)",
                 "ts::TrainingState");
  });
}

}  // namespace
}  // namespace tessera
