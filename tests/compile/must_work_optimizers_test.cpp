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
using namespace same_as_eager;

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
          auto opt = shared_sgd(model);
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
            return with_module(torch::tensor(opt->lr(0), torch::kDouble), *model);
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
          return with_module(loss, *model);
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

// How a step gets its optimizer.
enum class Given { AsArgument, ByReference, BySharedPointer };

// The calls, and eager steps between them, are those of the optimizer itself. Its step in a program is that of
// tessera::optim, which rounds as PyTorch does in Python, so bits may differ.
template <class Optimizer, class Options>
void expect_torch_optimizer_works(const Options& options, Given given) {
  const auto run = [&](const bool compiled) {
    torch::manual_seed(7);
    MLP model(models::mlp_module());
    const auto pointer = std::make_shared<Optimizer>(model->parameters(), options);
    auto& opt = *pointer;
    torch::optim::StepLR scheduler(opt, 2, 0.5);
    auto by_argument = as_is_or_compiled(train_step, compiled);
    auto by_reference =
        as_is_or_compiled([&](auto& m, const at::Tensor& x) { return train_step(m, opt, x); }, compiled);
    auto by_pointer =
        as_is_or_compiled([pointer](auto& m, const at::Tensor& x) { return train_step(m, *pointer, x); }, compiled);
    std::vector<Tensors> seen;
    for (int call = 0; call < 8; call++) {
      const auto x = torch::randn({8, 10});
      const auto loss = call == 5                     ? train_step(model, opt, x)
                        : given == Given::AsArgument  ? by_argument(model, opt, x)
                        : given == Given::ByReference ? by_reference(model, x)
                                                      : by_pointer(model, x);
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

template <class Optimizer, class Options>
void expect_torch_optimizer_works(const Options& options, const char* name) {
  SCOPED_TRACE(name);
  for (const auto given : {Given::AsArgument, Given::ByReference, Given::BySharedPointer})
    expect_torch_optimizer_works<Optimizer>(options, given);
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

TEST(MustWork, CapturedOptimizersOfTorchCompileOnce) {
  MLP model(models::mlp_module());
  torch::optim::Adam opt(model->parameters(), torch::optim::AdamOptions(0.1));
  auto step = compile([&](auto& m, const at::Tensor& x) { return train_step(m, opt, x); }, quick());
  for (int call = 0; call < 5; call++) {
    opt.param_groups()[0].options().set_lr(0.1 / (1 + call));
    step(model, torch::randn({8, 10}));
  }
  EXPECT_EQ(step.cache().size(), 1u);
  EXPECT_TRUE(step.recompiles().empty());
  static_cast<torch::optim::AdamOptions&>(opt.param_groups()[0].options()).eps(1e-3);
  EXPECT_FALSE(step.is_cached(model, torch::randn({8, 10})));
}

struct OwnTorchOptimizer : torch::optim::SGD {
  using torch::optim::SGD::SGD;
};

// Behind a pointer, another optimizer can take the place of the captured one. The refusal leaves nothing behind.
TEST(MustWork, OptimizersOfTorchBehindAPointer) {
  MLP model(models::mlp_module());
  auto opt = std::make_unique<torch::optim::Adam>(model->parameters(), torch::optim::AdamOptions(0.1));
  const auto body = [&](auto& m, const at::Tensor& x) { return train_step(m, *opt, x).detach(); };
  auto step = compile(body, quick());
  const auto before = tensors_of_module(*model);
  EXPECT_ERROR(UsageError, step(model, torch::randn({8, 10})), "torch::optim::Adam", "pointer", "as an argument");
  same_as_eager::expect_equal_tensors(tensors_of_module(*model), before, "after the error");
  EXPECT_TRUE(opt->state().empty());
  expect_same_calls(
      [](const bool compiled) {
        MLP m(models::mlp_module());
        auto owner = std::make_shared<std::unique_ptr<torch::optim::Adam>>(
            std::make_unique<torch::optim::Adam>(m->parameters(), torch::optim::AdamOptions(0.1)));
        auto falls_back =
            as_is_or_compiled([owner](auto& net, const at::Tensor& x) { return train_step(net, **owner, x).detach(); },
                              compiled, {.codegen = false, .fullgraph = false});
        return [=](int call) mutable {
          if (call == 3) owner->reset(new torch::optim::Adam(m->parameters(), torch::optim::AdamOptions(0.2)));
          falls_back(m, torch::randn({8, 10}));
          return tensors_of_module(*m);
        };
      },
      6);
}

TEST(MustWork, OptimizersOfTorchThatAreRefused) {
  const auto step = [](auto& m, auto& o, const at::Tensor& x) {
    o.zero_grad();
    auto loss = m(x).pow(2).mean();
    loss.backward();
    o.step();
    return loss.detach();
  };
  MLP model(models::mlp_module());
  torch::optim::Adam opt(model->parameters(), torch::optim::AdamOptions(0.1));
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

// The rate that the step reads from the options is the one of the call. Of a captured optimizer, a check finds it.
TEST(MustWork, NumbersReadFromOptionsOfTorchInside) {
  MLP model(models::mlp_module());
  torch::optim::SGD opt(model->parameters(), torch::optim::SGDOptions(0.1));
  auto given = compile([](auto& o, const at::Tensor& x) { return x * o.param_groups()[0].options().get_lr(); },
                       {.codegen = false, .captures = Captures::None});
  auto reads = compile([&opt](const at::Tensor& x) { return x * opt.param_groups()[0].options().get_lr(); }, quick());
  for (const double lr : {0.1, 0.2, 0.3, 0.1}) {
    opt.param_groups()[0].options().set_lr(lr);
    const auto x = torch::randn({3});
    EXPECT_TRUE(equal_bits(given(opt, x), x * lr)) << lr;
    if (lr == 0.2) {
      EXPECT_ERROR(UsageError, reads(x), "has changed since the step was traced", "0.2");
    } else if (lr == 0.1) {
      EXPECT_TRUE(equal_bits(reads(x), x * lr));
    }
  }
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

// LBFGS evaluates its closure as often as the losses ask for: refused, or in eager mode; its closure can be compiled.
TEST(MustWork, LBFGSOfTorch) {
  const auto step = [](auto& m, auto& o, const at::Tensor& x) {
    return o.step([&] {
      o.zero_grad();
      auto loss = m(x).pow(2).mean();
      loss.backward();
      return loss;
    });
  };
  MLP model(models::mlp_module());
  torch::optim::LBFGS opt(model->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
  auto given = compile(step, quick());
  EXPECT_ERROR(UsageError, given(model, opt, torch::randn({8, 10})), "torch::optim::LBFGS", "closure");
  auto captured = compile([&](const at::Tensor& x) { return step(model, opt, x); }, quick());
  EXPECT_ERROR(UsageError, captured(torch::randn({8, 10})), "torch::optim::LBFGS", "closure");
  EXPECT_TRUE(opt.state().empty());
  enum class Compiled { Argument, Captured, Closure };
  for (const auto what : {Compiled::Argument, Compiled::Captured, Compiled::Closure})
    expect_same_calls(
        [=](const bool compiled) {
          MLP m(models::mlp_module());
          auto o = std::make_shared<torch::optim::LBFGS>(m->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
          const CompileOptions eager_if_refused{.codegen = false, .fullgraph = false};
          auto by_argument = as_is_or_compiled(step, compiled && what == Compiled::Argument, eager_if_refused);
          auto by_capture = as_is_or_compiled([=](auto& net, const at::Tensor& x) { return step(net, *o, x); },
                                              compiled && what == Compiled::Captured, eager_if_refused);
          auto closure = as_is_or_compiled(
              [](auto& net, const at::Tensor& x) {
                for (auto& p : net->parameters()) p.mutable_grad().reset();
                auto loss = net(x).pow(2).mean();
                loss.backward();
                return loss.detach();
              },
              compiled && what == Compiled::Closure);
          return [=](int) mutable {
            const auto x = torch::randn({8, 10});
            if (what == Compiled::Argument) by_argument(m, *o, x);
            if (what == Compiled::Captured) by_capture(m, x);
            if (what == Compiled::Closure) o->step([&] { return closure(m, x); });
            return tensors_of_module(*m);
          };
        },
        3);
}

}  // namespace
}  // namespace tessera
