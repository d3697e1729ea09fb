// Optimizers and schedulers in compiled steps: equal to eager mode, or refused with a reason.
#include "tessera/compile/api/compile.h"
#include "tessera/models/mlp.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/schedulers.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"

#include "same_as_eager.h"
#include "train_step.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

namespace tessera {
namespace {

using models::MLP;
using same_as_eager::as_is_or_compiled;
using same_as_eager::equal_bits;
using same_as_eager::expect_same_calls;
using same_as_eager::quick;
using same_as_eager::tensors_of_module;

TEST(MustWork, SchedulerInsideTheStep) {
  for (const bool tensor_lr : {false, true})
    expect_same_calls(
        [=](const bool compiled) {
          MLP model(models::mlp_module());
          optim::SGD::Options options{.lr = 0.1};
          if (tensor_lr) options.lr = torch::tensor(0.1);
          auto opt = std::make_shared<optim::SGD>(model->parameters(), options);
          auto scheduler = std::make_shared<optim::StepLR>(*opt, 2, 0.5);
          auto cosine = std::make_shared<optim::CosineAnnealingLR>(*opt, 10);
          auto step = as_is_or_compiled(
              [=](auto& m, const at::Tensor& x) mutable {
                auto loss = train_step(m, *opt, x);
                scheduler->step();
                cosine->step();
                return loss.detach();
              },
              compiled);
          return [=](int) mutable {
            auto loss = step(model, torch::randn({8, 10}));
            auto all = tensors_of_module(*model);
            all.push_back(loss);
            all.push_back(torch::tensor(opt->lr(0), torch::kDouble));
            all.push_back(torch::tensor(scheduler->last_epoch()));
            all.push_back(torch::tensor(scheduler->last_lr()[0], torch::kDouble));
            return all;
          };
        },
        6);
}

// The optimizer would have to use a rate that the program has not computed yet.
TEST(MustWork, SchedulerBeforeTheOptimizerIsRefused) {
  MLP model(models::mlp_module());
  optim::SGD opt(model->parameters(), {.lr = 0.1});
  optim::StepLR scheduler(opt, 2, 0.5);
  auto step = compile(
      [&](auto& m, const at::Tensor& x) {
        scheduler.step();
        return train_step(m, opt, x);
      },
      quick());
  EXPECT_ERROR(UsageError, step(model, torch::randn({8, 10})), "scheduler", "after the optimizer");
  EXPECT_EQ(scheduler.last_epoch(), 0);
  EXPECT_EQ(opt.lr(0), 0.1);
}

TEST(MustWork, LearningRateSetInsideTheStep) {
  for (const bool before : {true, false})
    expect_same_calls(
        [=](const bool compiled) {
          MLP model(models::mlp_module());
          auto opt = std::make_shared<optim::SGD>(model->parameters(), optim::SGD::Options{.lr = 0.1});
          auto step = as_is_or_compiled(
              [=](auto& m, const at::Tensor& x) mutable {
                if (before) opt->set_lr(0, 0.05);
                auto loss = train_step(m, *opt, x);
                if (!before) opt->set_lr(0, 0.02);
                return loss.detach();
              },
              compiled);
          return [=](int call) mutable {
            if (call == 2) opt->set_lr(0, 0.3);
            auto loss = step(model, torch::randn({8, 10}));
            auto all = tensors_of_module(*model);
            all.push_back(torch::tensor(opt->lr(0), torch::kDouble));
            return all;
          };
        },
        4);
}

TEST(MustWork, NumbersReadFromOptionsInside) {
  expect_same_calls(
      [](const bool compiled) {
        MLP model(models::mlp_module());
        auto opt = std::make_shared<optim::SGD>(model->parameters(), optim::SGD::Options{.lr = 0.1, .momentum = 0.5});
        auto step = as_is_or_compiled(
            [=](auto& m, const at::Tensor& x) mutable {
              opt->zero_grad();
              auto loss = m(x).pow(2).mean() * opt->group_options(0).momentum * opt->group_options(0).lr.number();
              loss.backward();
              opt->step();
              return loss.detach() * opt->lr(0);
            },
            compiled);
        return [=](int call) mutable {
          if (call == 2) opt->set_lr(0, 0.3);
          if (call == 3) opt->set_group_options(0, {.lr = 0.3, .momentum = 0.2});
          if (call == 4) opt->set_lr(0, 0.1);
          auto loss = step(model, torch::randn({8, 10}));
          auto all = tensors_of_module(*model);
          all.push_back(loss);
          return all;
        };
      },
      6);
}

// Values of an optimizer of torch::optim: state, step counts and options.
Tensors torch_optimizer_values(torch::optim::Optimizer& optimizer) {
  Tensors all;
  const auto access = access_to(optimizer);
  for (const auto& p : optimizer.param_groups()[0].params())
    for (const auto& [name, value] : access->state(p)) all.push_back(value.to(torch::kDouble));
  for (const auto& [name, value] : access->options(0)) all.push_back(value);
  return all;
}

// An argument: the calls, and eager steps between them, are those of the optimizer itself. Its step in a program is
// that of tessera::optim, which rounds as PyTorch does in Python, so bits may differ.
template <class Optimizer, class Options>
void expect_torch_optimizer_works(const Options& options, const char* name) {
  SCOPED_TRACE(name);
  const auto run = [&](const bool compiled) {
    torch::manual_seed(7);
    MLP model(models::mlp_module());
    Optimizer opt(model->parameters(), options);
    torch::optim::StepLR scheduler(opt, 2, 0.5);
    auto step = as_is_or_compiled(train_step, compiled);
    std::vector<Tensors> seen;
    for (int call = 0; call < 8; call++) {
      const auto x = torch::randn({8, 10});
      const auto loss = call == 5 ? train_step(model, opt, x) : step(model, opt, x);
      scheduler.step();
      if (call == 2) static_cast<Options&>(opt.param_groups()[0].options()).weight_decay(0.2);
      if (call == 6) {  // as a checkpoint does
        const auto access = access_to(opt);
        for (const auto& p : model->parameters())
          if (auto state = access->state(p); !state.empty()) {
            StateDict copies;
            for (const auto& [key, value] : state) copies.insert(key, value.clone());
            access->set_state(p, copies);
          }
      }
      auto all = tensors_of_module(*model);
      all.push_back(loss.detach());
      for (const auto& value : torch_optimizer_values(opt)) all.push_back(value);
      for (auto& value : all) value = value.clone();
      seen.push_back(all);
    }
    return seen;
  };
  const auto eager = run(false), compiled = run(true);
  for (size_t call = 0; call < eager.size(); call++) {
    ASSERT_EQ(eager[call].size(), compiled[call].size()) << "call " << call;
    for (size_t i = 0; i < eager[call].size(); i++)
      EXPECT_TRUE(torch::allclose(compiled[call][i], eager[call][i], 1e-5, 1e-6))
          << "call " << call << " value " << i << "\n"
          << compiled[call][i] << eager[call][i];
  }
}

TEST(MustWork, OptimizersOfTorch) {
  namespace to = torch::optim;
  expect_torch_optimizer_works<to::SGD>(to::SGDOptions(0.1), "SGD");
  expect_torch_optimizer_works<to::SGD>(to::SGDOptions(0.1).momentum(0.9).nesterov(true), "SGD with momentum");
  expect_torch_optimizer_works<to::SGD>(to::SGDOptions(0.1).momentum(0.9).dampening(0.3), "SGD with dampening");
  expect_torch_optimizer_works<to::Adam>(to::AdamOptions(0.1).amsgrad(true), "Adam");
  expect_torch_optimizer_works<to::AdamW>(to::AdamWOptions(0.1), "AdamW");
  expect_torch_optimizer_works<to::RMSprop>(to::RMSpropOptions(0.01).momentum(0.5).centered(true), "RMSprop");
  expect_torch_optimizer_works<to::Adagrad>(to::AdagradOptions(0.1).lr_decay(0.1), "Adagrad");
}

// The first step is without dampening. Checks trace the step again after it. From call 3 on, two more parameters have
// gradients, so there are first steps again.
TEST(MustWork, SGDWithDampening) {
  for (const bool fused : {false, true})
    expect_same_calls(
        [=](const bool compiled) {
          MLP model(models::mlp_module());
          auto opt = std::make_shared<optim::SGD>(
              model->parameters(),
              optim::SGD::Options{.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .foreach = !fused, .fused = fused});
          auto step = as_is_or_compiled(train_step, compiled, {.codegen = false, .check = 8});
          const auto train_net1 = [=](bool on) {
            for (const auto& p : model->named_parameters())
              if (p.key().starts_with("net1")) p.value().set_requires_grad(on);
          };
          train_net1(false);
          return [=](int call) mutable {
            if (call == 3) train_net1(true);
            auto loss = step(model, *opt, torch::randn({8, 10}));
            auto all = tensors_of_module(*model);
            for (const auto& p : model->parameters())
              for (const auto& [name, value] : opt->state(p)) all.push_back(value);
            return all;
          };
        },
        8);
}

// One program serves all learning rates and step counts; other options, and new state tensors, are another program.
TEST(MustWork, OptimizersOfTorchCompileOnce) {
  MLP model(models::mlp_module());
  torch::optim::Adam opt(model->parameters(), torch::optim::AdamOptions(0.1));
  auto step = compile(train_step);
  for (int call = 0; call < 5; call++) {
    opt.param_groups()[0].options().set_lr(0.1 / (1 + call));
    step(model, opt, torch::randn({8, 10}));
  }
  EXPECT_EQ(step.cache().size(), 1u) << step.recompiles()[0];
  EXPECT_TRUE(step.is_cached(model, opt, torch::randn({8, 10})));
  static_cast<torch::optim::AdamOptions&>(opt.param_groups()[0].options()).eps(1e-3);
  EXPECT_FALSE(step.is_cached(model, opt, torch::randn({8, 10})));
}

struct OwnTorchOptimizer : torch::optim::SGD {
  using torch::optim::SGD::SGD;
};

// Captured, they run on the host while the step is traced, and only then.
TEST(MustWork, OptimizersOfTorchThatAreRefused) {
  const auto step = [](auto& m, auto& o, const at::Tensor& x) {
    o.zero_grad();
    auto loss = m(x).pow(2).mean();
    loss.backward();
    o.step();
    return loss.detach();
  };
  MLP model(models::mlp_module());
  const auto before = tensors_of_module(*model);
  torch::optim::Adam opt(model->parameters(), torch::optim::AdamOptions(0.1));
  auto captured = compile([&](const at::Tensor& x) { return step(model, opt, x); }, quick());
  const auto call = [&] {
    for (int i = 0; i < 3; i++) captured(torch::randn({8, 10}));
  };
  EXPECT_ERROR(UsageError, call(), "host", "as an argument");
  same_as_eager::expect_equal_tensors(tensors_of_module(*model), before, "after the error");

  torch::optim::StepLR scheduler(opt, 1, 0.5);
  auto scheduled = compile(
      [&](auto& m, auto& o, const at::Tensor& x) {
        auto loss = step(m, o, x);
        scheduler.step();
        return loss;
      },
      quick());
  EXPECT_ERROR(UsageError, scheduled(model, opt, torch::randn({8, 10})), "scheduler", "outside of the compiled step");
  EXPECT_EQ(opt.param_groups()[0].options().get_lr(), 0.1);

  OwnTorchOptimizer own(model->parameters(), 0.1);
  auto given = compile(step, quick());
  EXPECT_ERROR(UsageError, given(model, own, torch::randn({8, 10})), "OwnTorchOptimizer", "OptimizerAccess");
}

// They have no numbers on the host that change.
template <class Optimizer, class Options>
void expect_captured_torch_optimizer_works(const Options& options) {
  expect_same_calls(
      [&](const bool compiled) {
        MLP model(models::mlp_module());
        auto opt = std::make_shared<Optimizer>(model->parameters(), options);
        auto step =
            as_is_or_compiled([=](auto& m, const at::Tensor& x) { return train_step(m, *opt, x).detach(); }, compiled);
        return [=](int) mutable {
          step(model, torch::randn({8, 10}));
          return tensors_of_module(*model);
        };
      },
      3);
}
TEST(MustWork, OptimizersOfTorchWithoutStateOnTheHost) {
  expect_captured_torch_optimizer_works<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  expect_captured_torch_optimizer_works<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1));
}

// RMSprop and Adagrad of tessera::optim, with every option.
TEST(MustWork, RMSpropAndAdagrad) {
  const auto train = [](const auto& make) {
    expect_same_calls(
        [&](const bool compiled) {
          MLP model(models::mlp_module());
          auto opt = make(model->parameters());
          auto step = as_is_or_compiled(train_step, compiled);
          return [=](int call) mutable {
            if (call == 2) opt->set_lr(0, 0.02);
            auto loss = step(model, *opt, torch::randn({8, 10}));
            auto all = tensors_of_module(*model);
            for (const auto& p : model->parameters())
              for (const auto& [name, value] : opt->state(p)) all.push_back(value);
            all.push_back(loss.detach());
            return all;
          };
        },
        4);
  };
  for (const double momentum : {0.0, 0.9})
    for (const bool centered : {false, true})
      train([=](const Tensors& p) {
        return std::make_shared<optim::RMSprop>(
            p, optim::RMSprop::Options{.lr = 0.01, .weight_decay = 0.1, .momentum = momentum, .centered = centered});
      });
  for (const double decay : {0.0, 0.1})
    for (const bool fused : {false, true})
      train([=](const Tensors& p) {
        return std::make_shared<optim::Adagrad>(
            p,
            optim::Adagrad::Options{
                .lr = 0.1, .lr_decay = decay, .weight_decay = 0.1, .initial_accumulator_value = 0.5, .fused = fused});
      });
}

TEST(MustWork, LBFGSOfTorch) {
  MLP model(models::mlp_module());
  torch::optim::LBFGS opt(model->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
  const auto step = [](auto& m, auto& o, const at::Tensor& x) {
    return o.step([&] {
      o.zero_grad();
      auto loss = m(x).pow(2).mean();
      loss.backward();
      return loss;
    });
  };
  auto given = compile(step, quick());
  EXPECT_ERROR(UsageError, given(model, opt, torch::randn({8, 10})), "torch::optim::LBFGS", "closure");
  auto captured = compile([&](const at::Tensor& x) { return step(model, opt, x); }, quick());
  EXPECT_ERROR(UsageError, captured(torch::randn({8, 10})), "depends on values");
}

}  // namespace
}  // namespace tessera
