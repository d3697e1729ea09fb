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

template <class Optimizer, class Options>
void expect_torch_optimizer_refused(const Options& options, const char* name, const char* instead) {
  SCOPED_TRACE(name);
  const auto step = [](auto& m, auto& o, const at::Tensor& x) {
    o.zero_grad();
    auto loss = m(x).pow(2).mean();
    loss.backward();
    o.step();
    return loss.detach();
  };
  MLP model(models::mlp_module());
  const auto before = tensors_of_module(*model);
  Optimizer opt(model->parameters(), options);
  auto given = compile(step, quick());
  EXPECT_ERROR(UsageError, given(model, opt, torch::randn({8, 10})), "torch::optim", instead);
  // Captured: the first calls may compile; a wrong number must not be computed silently.
  auto captured = compile([&](const at::Tensor& x) { return step(model, opt, x); }, quick());
  const auto call = [&] {
    for (int i = 0; i < 3; i++) captured(torch::randn({8, 10}));
  };
  EXPECT_ERROR(UsageError, call(), "host", "tessera::optim");
  same_as_eager::expect_equal_tensors(tensors_of_module(*model), before, "after the error");
}

TEST(MustWork, OptimizersOfTorch) {
  expect_torch_optimizer_refused<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9), "SGD",
                                                    "tessera::optim");
  expect_torch_optimizer_refused<torch::optim::Adam>(torch::optim::AdamOptions(0.1), "Adam", "tessera::optim");
  expect_torch_optimizer_refused<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1), "AdamW", "tessera::optim");
  expect_torch_optimizer_refused<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.1), "RMSprop", "tessera::optim");
  expect_torch_optimizer_refused<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1).lr_decay(0.1), "Adagrad",
                                                        "tessera::optim");
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
  EXPECT_ERROR(UsageError, given(model, opt, torch::randn({8, 10})), "torch::optim");
  auto captured = compile([&](const at::Tensor& x) { return step(model, opt, x); }, quick());
  EXPECT_ERROR(UsageError, captured(torch::randn({8, 10})), "depends on values");
}

}  // namespace
}  // namespace tessera
