// Every optimizer of torch::optim and tessera::optim, through torch::optim::Optimizer&, with schedulers of both: 10
// steps on sharded parameters, with DistributedDataParallel, with fully_shard and with a compiled forward and backward
// give the losses and learning rates of a plain run.
#include "tessera/base/error.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/state_dict.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/schedulers.h"
#include "tessera/optim/sgd.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <torch/torch.h>

#include <mutex>

#include <torch/headeronly/version.h>
#include <cmath>
#include <functional>
#include <sstream>

namespace tessera::optim {
namespace {

using testing::Rank;
using testing::run_ranks;
using TorchOptimizer = torch::optim::Optimizer;
using Net = nn::Sequential;

constexpr int kSteps = 10;

struct EverywhereCase {
  const char* name;
  std::function<std::unique_ptr<TorchOptimizer>(Tensors)> make;
  bool is_lbfgs = false;
};
template <class Kind, class Options>
EverywhereCase everywhere(const char* name, Options options, bool is_lbfgs = false) {
  return {name, [options](Tensors p) { return std::make_unique<Kind>(std::move(p), options); }, is_lbfgs};
}
const std::vector<EverywhereCase>& all_optimizers() {
  namespace to = torch::optim;
  static const std::vector<EverywhereCase> all = {
      everywhere<to::SGD>("torch::optim::SGD", to::SGDOptions(0.1).momentum(0.9).nesterov(true)),
      everywhere<to::Adam>("torch::optim::Adam", to::AdamOptions(0.02).amsgrad(true)),
      everywhere<to::AdamW>("torch::optim::AdamW", to::AdamWOptions(0.02)),
      everywhere<to::RMSprop>("torch::optim::RMSprop", to::RMSpropOptions(0.005).momentum(0.5).centered(true)),
      everywhere<to::Adagrad>("torch::optim::Adagrad", to::AdagradOptions(0.1).lr_decay(0.1)),
      everywhere<to::LBFGS>("torch::optim::LBFGS", to::LBFGSOptions(0.5).max_iter(3), true),
      everywhere<SGD>("SGD", SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true}),
      everywhere<Adam>("Adam", AdamOptions{.lr = 0.02, .amsgrad = true}),
      everywhere<AdamW>("AdamW", AdamWOptions{.lr = 0.02, .fused = true}),
      everywhere<RMSprop>("RMSprop", RMSpropOptions{.lr = 0.005, .momentum = 0.5, .centered = true}),
      everywhere<Adagrad>("Adagrad", AdagradOptions{.lr = 0.1, .lr_decay = 0.1}),
  };
  return all;
}

// Calls a scheduler's step after each step of the optimizer.
using AfterStep = std::function<void(double loss)>;
struct SchedulerCase {
  const char* name;
  std::function<AfterStep(TorchOptimizer&)> make;
};
const std::vector<SchedulerCase>& all_schedulers() {
  static const std::vector<SchedulerCase> all = {
      {"torch::optim::StepLR",
       [](TorchOptimizer& o) -> AfterStep {
         return [s = std::make_shared<torch::optim::StepLR>(o, 3, 0.5)](double) { s->step(); };
       }},
      {"torch::optim::ReduceLROnPlateau",
       [](TorchOptimizer& o) -> AfterStep {
         using Plateau = torch::optim::ReduceLROnPlateauScheduler;
         auto s = std::make_shared<Plateau>(o, Plateau::min, 0.5F, 1, /*threshold=*/0.3);
         return [s](double loss) { s->step(static_cast<float>(loss)); };
       }},
      {"SequentialLR",
       [](TorchOptimizer& o) -> AfterStep {
         auto warmup = std::make_shared<LinearLR>(o, 0.5, 1.0, 3);
         auto cosine = std::make_shared<CosineAnnealingLR>(o, 10);
         auto s = std::make_shared<SequentialLR>(o, std::vector<std::shared_ptr<LRScheduler>>{warmup, cosine},
                                                 std::vector<int64_t>{3});
         return [s](double) { s->step(); };
       }},
  };
  return all;
}

Net make_net() {
  static std::mutex mutex;  // ranks are threads with one generator: seed and draws belong together
  const std::lock_guard lock(mutex);
  torch::manual_seed(3);
  return Net(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 3));
}
Tensors batch(int step) {
  auto x = torch::sin(torch::arange(48).view({8, 6}) * (0.3 + 0.1 * step));
  return {x, x.slice(1, 0, 3).cos()};
}
double mean_over(const comm::Group& group, at::Tensor loss) {
  loss = loss.detach().clone();
  group->all_reduce(loss, ReduceOp::Avg).wait();
  return loss.item<double>();
}

// A function of the kind that users have: it takes any optimizer. `loss` runs forward and backward of a step and
// returns the mean loss of all ranks. Returns losses and learning rates.
std::vector<double> train(TorchOptimizer& optimizer, const SchedulerCase& scheduler,
                          const std::function<double(int step)>& loss) {
  const auto after_step = scheduler.make(optimizer);
  std::vector<double> trace;
  for (int step = 0; step < kSteps; step++) {
    const auto closure = [&] {
      optimizer.zero_grad();
      return torch::tensor(loss(step), torch::kDouble);
    };
    const double value = optimizer.step(closure).item<double>();
    after_step(value);
    trace.push_back(value);
    trace.push_back(optimizer.param_groups()[0].options().get_lr());
  }
  return trace;
}

std::function<double(int)> full_batch_loss(Net& net) {
  return [&net](int step) {
    const auto b = batch(step);
    auto loss = torch::mse_loss(net(b[0]), b[1]);
    loss.backward();
    return loss.item<double>();
  };
}

std::vector<double> train_plain(const EverywhereCase& one, const SchedulerCase& scheduler) {
  auto net = make_net();
  const auto optimizer = one.make(net->parameters());
  return train(*optimizer, scheduler, full_batch_loss(net));
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  const double tolerance = what.find("LBFGS") != std::string::npos ? 1e-4 : 2e-5;  // its line search amplifies rounding
  for (size_t i = 0; i < found.size(); i++)
    EXPECT_NEAR(found[i], expected[i], tolerance * (1 + std::abs(expected[i]))) << what << " entry " << i;
}

// Each parallelism as a function of (case, scheduler, rank) -> trace. Ranks have their part of the batch.
using Trainer = std::function<std::vector<double>(const EverywhereCase&, const SchedulerCase&, Rank&)>;

template <class Model>
std::function<double(int)> rank_loss(Model& model, Rank& me) {
  return [&model, &me](int step) {
    const int64_t rows = 8 / me.size();
    const auto b = batch(step);
    auto loss = torch::mse_loss(model(b[0].narrow(0, me.rank * rows, rows)), b[1].narrow(0, me.rank * rows, rows));
    loss.backward();
    return mean_over(me.group(), loss);
  };
}

std::vector<double> train_ddp(const EverywhereCase& one, const SchedulerCase& scheduler, Rank& me) {
  DistributedDataParallel ddp(make_net());
  const auto optimizer = one.make(ddp->parameters());
  return train(*optimizer, scheduler, rank_loss(ddp, me));
}
std::vector<double> train_fsdp(const EverywhereCase& one, const SchedulerCase& scheduler, Rank& me) {
  auto net = make_net();
  fully_shard(net, {.mesh = me.mesh({me.size()}, {"fsdp"})});
  const auto optimizer = one.make(net->parameters());
  return train(*optimizer, scheduler, rank_loss(net, me));
}
std::vector<double> train_tensor_parallel(const EverywhereCase& one, const SchedulerCase& scheduler, Rank& me) {
  auto net = make_net();
  parallelize_module(net, me.mesh({me.size()}, {"tp"}), {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
  const auto optimizer = one.make(net->parameters());
  return train(*optimizer, scheduler, full_batch_loss(net));
}
std::vector<double> train_compiled(const EverywhereCase& one, const SchedulerCase& scheduler, Rank& me) {
  DistributedDataParallel ddp(make_net());
  const auto optimizer = one.make(ddp->parameters());
  auto step_loss = compile([&](const at::Tensor& x, const at::Tensor& y) {
    auto loss = torch::mse_loss(ddp(x), y);
    loss.backward();
    return loss.detach();
  });
  return train(*optimizer, scheduler, [&](int step) {
    const int64_t rows = 8 / me.size();
    const auto b = batch(step);
    const auto part = [&](const at::Tensor& t) { return t.narrow(0, me.rank * rows, rows).contiguous(); };
    return mean_over(me.group(), step_loss(part(b[0]), part(b[1])));
  });
}

TEST(Everywhere, TenStepsAsPlain) {
  const std::pair<const char*, Trainer> parallelisms[] = {
      {"DDP", train_ddp}, {"fully_shard", train_fsdp}, {"tensor parallel", train_tensor_parallel}};
  size_t turn = 0;
  for (const auto& one : all_optimizers())
    for (const auto& [parallelism, trainer] : parallelisms) {
      const auto& scheduler = all_schedulers()[turn++ % all_schedulers().size()];  // 33 of 99 combinations
      const auto plain = train_plain(one, scheduler);
      EXPECT_LT(plain[2 * (kSteps - 1)], plain[0]) << one.name;
      for (const int64_t n : {1, 2})
        run_ranks(n, [&, &trainer = trainer, &parallelism = parallelism](Rank& me) {
          expect_near(trainer(one, scheduler, me), plain,
                      c10::str(one.name, ", ", scheduler.name, ", ", parallelism, ", ", n, " ranks"));
        });
    }
}

TEST(Everywhere, CompiledForwardAndBackward) {
  for (size_t i = 0; i < all_optimizers().size(); i++) {
    const auto& one = all_optimizers()[i];
    const auto& scheduler = all_schedulers()[i % all_schedulers().size()];
    const auto plain = train_plain(one, scheduler);
    run_ranks(2, [&](Rank& me) {
      expect_near(train_compiled(one, scheduler, me), plain, c10::str(one.name, ", ", scheduler.name, ", compiled"));
    });
  }
}

// The entire step is compiled, and takes the optimizer by its base class. `part` has this rank's part of the batch.
template <class Model>
std::vector<double> train_compiled_step(Model& model, TorchOptimizer& optimizer, const SchedulerCase& scheduler,
                                        const std::function<at::Tensor(const at::Tensor&)>& part,
                                        const std::function<double(const at::Tensor&)>& mean) {
  auto step = compile(
      [](Model& m, TorchOptimizer& o, const at::Tensor& x, const at::Tensor& y) {
        o.zero_grad();
        auto loss = torch::mse_loss(m(x), y);
        loss.backward();
        o.step();
        return loss.detach();
      },
      {.codegen = false});
  const auto after_step = scheduler.make(optimizer);
  std::vector<double> trace;
  for (int i = 0; i < kSteps; i++) {
    const auto b = batch(i);
    trace.push_back(mean(step(model, optimizer, part(b[0]), part(b[1]))));
    after_step(trace.back());
    trace.push_back(optimizer.param_groups()[0].options().get_lr());
  }
  return trace;
}

// LBFGS evaluates its closure as often as the losses ask for, so it runs eagerly; its closure is compiled.
template <class Model>
std::vector<double> train_compiled_closure(Model& model, TorchOptimizer& optimizer, const SchedulerCase& scheduler,
                                           const std::function<at::Tensor(const at::Tensor&)>& part,
                                           const std::function<double(const at::Tensor&)>& mean) {
  auto evaluate = compile(
      [](Model& m, const at::Tensor& x, const at::Tensor& y) {
        auto loss = torch::mse_loss(m(x), y);
        loss.backward();
        return loss.detach();
      },
      {.codegen = false});
  return train(optimizer, scheduler, [&](int step) {
    const auto b = batch(step);
    return mean(evaluate(model, part(b[0]), part(b[1])));
  });
}

TEST(Everywhere, OptimizerReferenceInACompiledStep) {
  for (size_t i = 0; i < all_optimizers().size(); i++) {
    const auto& one = all_optimizers()[i];
    const auto& scheduler = all_schedulers()[i % 2];
    const auto plain = train_plain(one, scheduler);
    run_ranks(2, [&](Rank& me) {
      const auto check = [&](auto& model, const auto& part, const auto& mean, const char* parallelism) {
        const auto optimizer = one.make(model->parameters());
        const auto trace = one.is_lbfgs ? train_compiled_closure(model, *optimizer, scheduler, part, mean)
                                        : train_compiled_step(model, *optimizer, scheduler, part, mean);
        expect_near(trace, plain, c10::str(one.name, ", ", parallelism));
      };
      const auto part = [&](const at::Tensor& t) { return t.narrow(0, me.rank * 4, 4).contiguous(); };
      const auto mean = [&](const at::Tensor& loss) { return mean_over(me.group(), loss); };
      DistributedDataParallel ddp(make_net());
      check(ddp, part, mean, "DDP");
      auto sharded = make_net();
      fully_shard(sharded, {.mesh = me.mesh({2}, {"fsdp"})});
      check(sharded, part, mean, "fully_shard");
      auto net = make_net();
      parallelize_module(net, me.mesh({2}, {"tp"}), {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
      const auto all = [](const at::Tensor& t) { return t; };
      const auto value = [](const at::Tensor& loss) { return loss.item<double>(); };
      check(net, all, value, "tensor parallel");
    });
  }
}

TEST(Everywhere, ATorchSchedulerInACompiledStepIsRefused) {
  auto net = make_net();
  SGD optimizer(net->parameters(), {.lr = 0.1});
  torch::optim::StepLR scheduler(optimizer, 1, 0.5);
  auto step = compile([&](Net& model, SGD& o, const at::Tensor& x) {
    o.zero_grad();
    auto loss = model(x).pow(2).mean();
    loss.backward();
    o.step();
    scheduler.step();
    return loss.detach();
  });
  EXPECT_ERROR(UsageError, step(net, optimizer, batch(0)[0]), "SGD", "scheduler", "outside of the compiled step");
  EXPECT_EQ(optimizer.lr(0), 0.1);
}

// LibTorch's options, groups and state of an optimizer of tessera::optim.
TEST(Everywhere, LibTorchsInterface) {
  auto p = torch::ones(3, torch::requires_grad()), q = torch::ones(3, torch::requires_grad());
  Adam adam({p}, {.lr = 0.1});
  TorchOptimizer& optimizer = adam;
  auto& options = static_cast<torch::optim::AdamOptions&>(optimizer.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.1);
  EXPECT_EQ(std::get<1>(options.betas()), 0.999);
  const auto before = adam.generation();
  options.lr(0.5);
  EXPECT_EQ(adam.lr(0), 0.5);
  EXPECT_EQ(adam.generation(), before);  // a compiled step reads the learning rate in each run
  options.betas({0.5, 0.6}).eps(0.25);
  EXPECT_EQ(adam.group_options(0).betas[1], 0.6);
  EXPECT_EQ(adam.group_options(0).eps, 0.25);
  EXPECT_NE(adam.generation(), before);
  options.eps(-1);
  EXPECT_ERROR(UsageError, adam.group_options(0), "eps");
  options.eps(0.25);

  optimizer.add_param_group(torch::optim::OptimizerParamGroup({q}));  // with the options of the constructor
  EXPECT_EQ(adam.lr(1), 0.1);
  EXPECT_EQ(adam.parameters().size(), 2u);
  p.mutable_grad() = q.mutable_grad() = torch::ones(3);
  optimizer.step();
  EXPECT_EQ(adam.state(q).size(), 3u);
  EXPECT_EQ(optimizer.state().size(), 2u);
  optimizer.state().clear();  // the next step is a first step
  EXPECT_TRUE(adam.state(q).empty());
  optimizer.step();
  EXPECT_EQ(adam.state(q).at("step").item<double>(), 1);

#if TORCH_VERSION_MINOR >= 13
  const auto r = torch::ones(2, torch::requires_grad());
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({r}, std::make_unique<torch::optim::AdamOptions>(0.125)));
  EXPECT_EQ(adam.lr(2), 0.125);
#endif
}

TEST(Everywhere, TorchSaveAndLoad) {
  const auto grads = [](const Tensors& parameters, double value) {
    for (const auto& p : parameters) p.mutable_grad() = torch::full_like(p, value);
  };
  auto net = make_net(), other = make_net();
  AdamW optimizer(net->parameters(), {.lr = 0.25, .amsgrad = true}), loaded(other->parameters());
  grads(net->parameters(), 1), optimizer.step();
  std::stringstream file;
  torch::save(optimizer, file);
  torch::load(loaded, file);
  EXPECT_EQ(loaded.lr(0), 0.25);
  grads(net->parameters(), 2), optimizer.step();
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < 4; i++) {
    EXPECT_TRUE(torch::equal(loaded.state(other->parameters()[i]).at("step"), torch::tensor(1.F)));
    EXPECT_TRUE(loaded.state(other->parameters()[i]).contains("max_exp_avg_sq"));
  }
  SGD another(other->parameters());
  std::stringstream again(file.str());
  EXPECT_ERROR(UsageError, torch::load(another, again), "SGD", "AdamW");
  run_ranks(2, [&](Rank& me) {
    auto sharded = make_net();
    fully_shard(sharded, {.mesh = me.mesh({2}, {"fsdp"})});
    AdamW own(sharded->parameters());
    std::stringstream out;
    EXPECT_ERROR(UsageError, torch::save(own, out), "AdamW", "S(0)", "ts::TrainingState");
  });
}

TEST(Everywhere, GradScalerWithTorchsOptimizers) {
  for (const auto& one : all_optimizers()) {
    if (one.is_lbfgs) continue;
    auto net = make_net(), reference = make_net();
    const auto optimizer = one.make(net->parameters()), plain = one.make(reference->parameters());
    GradScaler scaler({.init_scale = 1024});
    for (int step = 0; step < 3; step++) {
      const auto b = batch(step);
      optimizer->zero_grad(), plain->zero_grad();
      scaler.scale(torch::mse_loss(net(b[0]), b[1])).backward();
      torch::mse_loss(reference(b[0]), b[1]).backward();
      if (step == 1) net->parameters()[0].mutable_grad().fill_(std::numeric_limits<float>::infinity());
      scaler.step(*optimizer);
      scaler.update();
      if (step != 1) plain->step();
    }
    EXPECT_EQ(scaler.get_scale(), 512) << one.name;
    for (size_t i = 0; i < 4; i++)
      EXPECT_TRUE(torch::allclose(net->parameters()[i], reference->parameters()[i], 1e-5, 1e-6)) << one.name;
  }
}

}  // namespace
}  // namespace tessera::optim
