// What the rest of the process does around a compiled step: global variables, hooks, threads, locales, signals of the
// floating-point unit. The step equals eager mode, or is refused with a reason.
#include "tessera/compile/api/compile.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"

#include "same_as_eager.h"
#include "train_step.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <cstdlib>
#include <cstring>
#include <locale>
#include <thread>

namespace tessera {
namespace {

using models::MLP;
using same_as_eager::equal_bits;
using same_as_eager::quick;

double global_factor = 2;
at::Tensor reads_a_global(const at::Tensor& x) { return x * global_factor; }

// Calls the step until it is refused, at most four times. A check is due at calls 2 and 4.
template <class Call>
void expect_refused_within_four_calls(const Call& call, const char* why) {
  const auto calls = [&] {
    for (int i = 0; i < 4; i++) call();
  };
  EXPECT_ERROR(UsageError, calls(), "has changed since the step was traced", why);
}

TEST(MustWork, GlobalVariablesAreChecked) {
  const auto x = torch::ones({3});
  const auto changes = [&](auto step) {
    global_factor = 2;
    step(x);
    global_factor = 3;
    expect_refused_within_four_calls([&] { step(x); }, "mul");
  };
  changes(compile([](const at::Tensor& t) { return t * global_factor; }, quick()));
  changes(compile(&reads_a_global, quick()));
  struct ScalingImpl : torch::nn::Module {
    at::Tensor forward(const at::Tensor& t) { return t * global_factor; }
  };
  changes(compile(torch::nn::ModuleHolder<ScalingImpl>(std::make_shared<ScalingImpl>()), quick()));
}

TEST(MustWork, VariablesOfHooksAreChecked) {
  nn::Linear model(3, 3);
  double factor = 2;
  register_forward_hook(*model, [&](Module&, const Tensors&, const Tensors& out) { return Tensors{out[0] * factor}; });
  auto step = compile([](nn::Linear& m, const at::Tensor& x) { return m(x).sum(); }, quick());
  step(model, torch::ones({3}));
  factor = 3;
  expect_refused_within_four_calls([&] { step(model, torch::ones({3})); }, "mul");
}

// A user's class derived from one of LibTorch has members of its own.
struct ScaledLinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
  double scale = 1;
  at::Tensor forward(const at::Tensor& x) { return torch::nn::LinearImpl::forward(x) * scale; }
};
TORCH_MODULE(ScaledLinear);
struct HookedScaledLinear : Holder<ScaledLinearImpl> {
  using Holder<ScaledLinearImpl>::Holder;
};

TEST(MustWork, MembersOfClassesDerivedFromLibTorchs) {
  const auto changes = [](auto model) {
    auto step =
        compile([](auto& m, const at::Tensor& x) { return m(x); }, {.codegen = false, .captures = Captures::None});
    for (const double scale : {1.0, 2.0, 1.0, 3.0}) {
      model->scale = scale;
      const auto x = torch::randn({2, 3});
      EXPECT_TRUE(equal_bits(step(model, x), model(x).detach())) << scale;
    }
  };
  changes(ScaledLinear(3, 3));
  changes(HookedScaledLinear(3, 3));
}

// A graph of eager mode that has saved a parameter notices that a compiled step has written to it.
TEST(MustWork, VersionsOfWrittenTensors) {
  MLP model(models::mlp_module());
  optim::SGD opt(model->parameters(), {.lr = 0.1});
  auto step = compile(train_step, quick());
  step(model, opt, torch::randn({8, 10}));
  auto loss = model(torch::randn({8, 10})).pow(2).mean();
  step(model, opt, torch::randn({8, 10}));
  EXPECT_ERROR(c10::Error, loss.backward(), "modified by an inplace operation");
}

// The gradients of a program have no graph.
TEST(MustWork, SecondDerivativesOfACompiledModuleAreRefused) {
  auto compiled = compile(nn::Sequential(nn::Linear(3, 3), nn::Tanh()), quick());
  auto x = torch::randn({2, 3}, torch::requires_grad());
  const auto y = compiled(x).sum();
  EXPECT_ERROR(UsageError, torch::autograd::grad({y}, {x}, {}, true, true), "create_graph", "orig_mod");
  EXPECT_TRUE(torch::autograd::grad({y}, {x})[0].defined());
}

// tanh saves its result. In eager mode a write into it is an error of backward.
TEST(MustWork, WritesIntoAResultThatBackwardNeeds) {
  auto compiled = compile(nn::Sequential(nn::Linear(3, 3), nn::Tanh()), quick());
  for (int i = 0; i < 2; i++) {
    auto x = torch::randn({2, 3}, torch::requires_grad());
    auto y = compiled(x);
    y.mul_(2);
    EXPECT_ERROR(c10::Error, y.sum().backward(), "modified");
  }
}

// A program has one memory for all its calls.
// In eager mode the gradients of some parameters are those of the old values, and of others those of the new ones.
TEST(MustWork, SetDataBetweenForwardAndBackwardIsRefused) {
  nn::Linear module(3, 3);
  auto compiled = compile(module, quick());
  const auto x = torch::randn({2, 3}, torch::requires_grad());
  compiled(x).sum().backward();
  auto loss = compiled(x).sum();
  module->weight.set_data(torch::randn({3, 3}));
  EXPECT_ERROR(UsageError, loss.backward(), "other memory after forward", "set_data");
  compiled(x).sum().backward();
}

TEST(MustWork, CallsOfTwoThreads) {
  const auto body = [](const at::Tensor& x) {
    auto y = x;
    for (int i = 0; i < 40; i++) y = (y * 1.01).sin() + x;
    return y.sum();
  };
  auto step = compile(body, quick());
  step(torch::ones({2000}));
  std::atomic<int> equal = 0, refused = 0, other = 0;
  std::vector<std::thread> threads;
  for (int n = 0; n < 3; n++)
    threads.emplace_back([&, n] {
      const auto x = torch::full({2000}, 0.1 * n);
      const auto wanted = body(x);
      for (int i = 0; i < 200; i++) {
        try {
          (equal_bits(step(x), wanted) ? equal : other)++;
        } catch (const UsageError& error) {
          (std::string(error.what()).find("two threads") != std::string::npos ? refused : other)++;
        }
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(other, 0);
  EXPECT_GT(equal, 0);
}

// Programs that ask for a signal at invalid operations: marks in place of numbers are signaling NaNs.
TEST(MustWork, SignalsOfTheFloatingPointUnit) {
  feclearexcept(FE_ALL_EXCEPT);
  feenableexcept(FE_INVALID | FE_DIVBYZERO);
  const auto body = [](const at::Tensor& x, double a) { return (x * a).sum(); };
  auto step = compile(body, quick());
  for (const double a : {0.5, 1.5, 2.5}) {
    const auto x = torch::rand({3});
    EXPECT_TRUE(equal_bits(step(x, a), body(x, a)));
  }
  fedisableexcept(FE_ALL_EXCEPT);
  EXPECT_EQ(step.cache().size(), 3u);  // a number is a key then
}

TEST(MustWork, FlagsOfTheFloatingPointUnit) {
  feclearexcept(FE_ALL_EXCEPT);
  auto step = compile([](const at::Tensor& x, double a) { return a > 1 ? x : x * 2; }, quick());
  step(torch::ones({3}), 0.5);
  EXPECT_EQ(fetestexcept(FE_INVALID), 0);
  feraiseexcept(FE_INVALID);
  step(torch::ones({3}), 1.5);
  EXPECT_NE(fetestexcept(FE_INVALID), 0);
  feclearexcept(FE_ALL_EXCEPT);
}

// A program may set a locale that writes 1234.5 as 1.234,5.
struct CommasAndGroups : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(MustWork, AnyLocale) {
  const auto before = std::locale::global(std::locale(std::locale::classic(), new CommasAndGroups));
  const auto body = [](const at::Tensor& x, double a) {
    return ((x * 1234.5 + 0.1234567).tanh() * a).mul(12345678).add(1.5).clamp_max(1e7);
  };
  auto step = compile(body, {.numerics = Numerics::Strict});
  for (const double a : {0.5, 1.5}) {
    const auto x = torch::rand({3000});
    EXPECT_TRUE(equal_bits(step(x, a), body(x, a)));
  }
  std::locale::global(before);
}

// The function in the table of virtual functions that step() of an optimizer calls.
template <class Optimizer>
void* step_entry(Optimizer& optimizer) {
  at::Tensor (Optimizer::*step)(torch::optim::Optimizer::LossClosure) = &Optimizer::step;
  uintptr_t offset = 0;
  char* table = nullptr;
  void* entry = nullptr;
  std::memcpy(&offset, &step, sizeof(offset));
  std::memcpy(static_cast<void*>(&table), static_cast<const void*>(&optimizer), sizeof(table));
  std::memcpy(static_cast<void*>(&entry), table + offset - 1, sizeof(entry));
  return entry;
}

// Compiles a step with a captured optimizer, which exchanges step(), and exits. The handler of exit() runs after the
// destructors of what was created later.
[[noreturn]] void exit_after_a_captured_optimizer() {
  auto w = torch::ones({2}, torch::requires_grad());
  static torch::optim::SGD optimizer({w}, torch::optim::SGDOptions(0.1));
  static void* const before = step_entry(optimizer);
  std::atexit([] { _exit(step_entry(optimizer) == before ? 0 : 3); });
  auto step = compile(
      [&](const at::Tensor& x) {
        optimizer.zero_grad();
        (w * x).sum().backward();
        optimizer.step();
      },
      quick());
  step(torch::ones({2}));
  std::exit(step_entry(optimizer) == before ? 4 : 5);
}

TEST(MustWork, TablesOfTorchOptimizersAreRestored) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // another process, in which no step is compiled yet
  EXPECT_EXIT(exit_after_a_captured_optimizer(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace tessera
