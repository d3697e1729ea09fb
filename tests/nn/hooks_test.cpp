// Hook features that PyTorch does not have. tests/parity/hooks_test.cpp compares the common features with PyTorch.
#include "tessera/nn/hooks.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/nn/grad_hooks.h"
#include "tessera/nn/modules.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

struct Batch {
  torch::Tensor tokens;
  std::optional<torch::Tensor> mask = {};
  int64_t index = 0;
  friend void tessera_visit(Batch& b, auto&& field) { field(b.tokens), field(b.mask); }
};
struct Opaque {
  torch::Tensor hidden;
};
struct Output {
  torch::Tensor value;
  std::vector<torch::Tensor> parts;
  std::string note;
  friend void tessera_visit(Output& o, auto&& field) { field(o.value), field(o.parts); }
};

// A forward with arguments of all kinds, which returns several tensors.
struct ManyImpl : torch::nn::Cloneable<ManyImpl> {
  void reset() override {}
  Output forward(torch::Tensor x, std::optional<torch::Tensor> bias, std::vector<torch::Tensor> list,
                 std::tuple<torch::Tensor, int> pair, Batch& batch, bool flag = true, const char* note = "unchanged") {
    batch.index++;
    auto sum = x + (bias ? *bias : torch::zeros({1})) + list.at(0) + list.at(1) + std::get<0>(pair) + batch.tokens;
    return {flag ? sum : -sum, {x, batch.tokens}, note};
  }
};
TESSERA_MODULE(Many);

TEST(Hooks, ReceiveAndReplaceTensorsInArgumentsOfAnyKind) {
  Many many;
  const auto one = torch::ones({1});
  Batch batch{one * 5};
  std::vector<double> received;
  many.register_forward_pre_hook([&](Module&, const Tensors& inputs) {
    auto changed = inputs;
    for (auto& t : changed) {
      received.push_back(t.defined() ? t.item<double>() : -1);
      if (t.defined()) t = t * 10;
    }
    return changed;
  });
  many.register_forward_hook([](Module&, const Tensors&, const Tensors& outputs) {
    auto changed = outputs;
    changed[0] = changed[0] + 1;
    return changed;
  });
  const auto x = one.clone();
  const auto out = many(x, std::nullopt, std::vector<torch::Tensor>{one * 2, one * 3}, std::tuple(one * 4, 7), batch);
  EXPECT_EQ(received, (std::vector<double>{1, -1, 2, 3, 4, 5, -1}));
  EXPECT_EQ(out.value.item<double>(), 10 + 20 + 30 + 40 + 50 + 1);
  EXPECT_EQ(out.parts.size(), 2u);
  EXPECT_EQ(out.note, "unchanged");
  EXPECT_EQ(x.item<double>(), 1);  // the caller's tensor is unchanged
  EXPECT_EQ(batch.index, 1);       // forward wrote to the caller's struct
}

struct BlindImpl : torch::nn::Module {
  torch::Tensor forward(const Opaque& o) { return o.hidden; }
};
TESSERA_MODULE(Blind);

TEST(Hooks, AnArgumentTypeWithoutVisitThrowsIfTheModuleHasHooks) {
  Blind blind;
  EXPECT_EQ(blind(Opaque{torch::ones({1})}).numel(), 1);
  blind.register_forward_hook([](Module&, const Tensors&, const Tensors&) {});
  EXPECT_ERROR(UsageError, blind(Opaque{torch::ones({1})}), "module Blind", "Opaque", "tessera_visit");
}

struct OuterImpl : torch::nn::Module {
  OuterImpl() {
    layers = register_module("layers", nn::ModuleList<nn::Linear>());
    for (int i = 0; i < 2; i++) layers->push_back(nn::Linear(2, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x;
  }
  nn::ModuleList<nn::Linear> layers{nullptr};
};
TESSERA_MODULE(Outer);

TEST(Hooks, AHookThatReturnsTheWrongNumberOfTensorsThrowsWithTheModuleName) {
  Outer outer;
  const auto x = torch::ones({1, 2}, torch::requires_grad());
  const auto two = [](auto&...) { return Tensors{torch::ones({1}), torch::ones({1})}; };
  auto handle = outer->layers[1].register_forward_pre_hook(two);
  EXPECT_ERROR(UsageError, outer(x), "forward pre hook of module Outer.layers.1", "returned 2 inputs", "received 1");
  handle.remove();
  handle = outer->layers[1].register_forward_hook(two);
  EXPECT_ERROR(UsageError, outer(x), "forward hook of module Outer.layers.1", "returned 2 outputs");
  handle.remove();
  handle = outer->layers[0].register_full_backward_hook(two);
  EXPECT_ERROR(UsageError, outer(x).sum().backward(), "backward hook of module Outer.layers.0", "gradients of inputs");
  handle.remove();
  handle = outer->layers[0].register_full_backward_pre_hook(two);
  EXPECT_ERROR(UsageError, outer(x).sum().backward(), "backward pre hook of module Outer.layers.0");
  handle.remove();
  handle = outer->layers[0].register_full_backward_hook([](auto&...) { return torch::ones({1, 2}); });
  EXPECT_ERROR(UsageError, outer(x.detach()).sum().backward(), "no input of the module needs one");
  handle.remove();
  outer(x).sum().backward();
}

TEST(Hooks, RunningModuleReturnsTheFullName) {
  Outer outer;
  std::vector<std::string> names;
  const auto note = [&](Module&, const Tensors&) { names.push_back(running_module()); };
  outer.register_forward_pre_hook(note);
  outer->layers[1].register_forward_pre_hook(note);
  outer(torch::ones({1, 2}));
  EXPECT_EQ(names, (std::vector<std::string>{"Outer", "Outer.layers.1"}));
  EXPECT_EQ(running_module(), "");
  EXPECT_ERROR(c10::Error, outer(torch::ones({1, 3})), "");
  EXPECT_EQ(running_module(), "");  // also when forward throws
}

TEST(Hooks, AroundHooksNestAndMayCallForwardLater) {
  nn::Linear linear(2, 2);
  std::vector<std::string> calls;
  ForwardCall saved;
  register_around_hook(*linear, [&](Module&, const Tensors& in, const ForwardCall& forward) {
    calls.push_back("inner");
    saved = forward;
    return forward(in);
  });
  register_around_hook(*linear, [&](Module&, const Tensors& in, const ForwardCall& forward) {
    calls.push_back("outer");
    return forward({in[0] * 2});
  });
  const auto x = torch::randn({3, 2});
  const auto y = linear(x);
  EXPECT_EQ(calls, (std::vector<std::string>{"outer", "inner"}));
  EXPECT_TRUE(torch::equal(saved({x * 2})[0], y));  // after the call has ended
}

struct TwoImpl : torch::nn::Module {
  std::tuple<torch::Tensor, int64_t> forward(torch::Tensor x) { return {x, 3}; }
};
TESSERA_MODULE(Two);

// Synchronized batch norm does this. If forward returns more than one tensor, the other results would be unknown.
TEST(Hooks, AnAroundHookMayReplaceForwardThatReturnsOneTensor) {
  nn::Linear linear(2, 2);
  const auto replace = [](Module&, const Tensors& in, const ForwardCall&) { return Tensors{in[0] * 2}; };
  register_around_hook(*linear, replace);
  const auto x = torch::ones({1, 2}, torch::requires_grad());
  const auto y = linear(x);
  EXPECT_TRUE(torch::equal(y, x * 2));
  y.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({1, 2}, 2)));
  Two two;
  register_around_hook(*two, replace);
  EXPECT_ERROR(InternalError, two(x), "an around hook of Two did not run forward");
}

TEST(Hooks, AnInPlaceWriteToAHookedOutputIsStillDetected) {
  nn::Sigmoid sigmoid;
  sigmoid.register_full_backward_hook([](auto&...) {});
  const auto x = torch::ones({2}, torch::requires_grad());
  auto y = sigmoid(x);
  y.mul_(2);  // the backward of sigmoid needs its output
  EXPECT_ERROR(c10::Error, y.sum().backward(), "modified by an inplace operation");
}

TEST(GradHooks, AMultiGradHookWorksWithLeavesInAutogradGrad) {  // PyTorch does not support this
  nn::Linear linear(2, 2);
  std::vector<size_t> defined;
  register_multi_grad_hook({linear->weight, linear->bias}, [&](const Tensors& grads) {
    defined.push_back(grads[0].defined() + 2 * grads[1].defined());
  });
  const auto x = torch::ones({1, 2});
  torch::autograd::grad({linear(x).sum()}, {linear->weight});
  torch::autograd::grad({linear(x).sum()}, {linear->bias, linear->weight});
  EXPECT_EQ(defined, (std::vector<size_t>{1, 3}));
  EXPECT_ERROR(UsageError, register_multi_grad_hook({x}, {}), "does not require a gradient");
}

struct PairImpl : torch::nn::Cloneable<PairImpl> {
  PairImpl() { reset(); }
  void reset() override {
    a = register_module("a", nn::Linear(2, 2));
    list = register_module("list", nn::ModuleList<nn::Linear>());
    list->push_back(nn::Linear(2, 2));
  }
  torch::Tensor forward(torch::Tensor x) { return list[0](a(x)); }
  nn::Linear a{nullptr};
  nn::ModuleList<nn::Linear> list{nullptr};
};
TESSERA_MODULE(Pair);

TEST(Clone, CopiesParametersAndHooks) {
  Pair pair;
  int calls = 0;
  pair->a.register_forward_hook([&](auto&...) { calls++; });
  pair->list[0].register_forward_hook([&](auto&...) { calls++; });
  auto by_method = Pair(std::dynamic_pointer_cast<Pair::ContainedType>(pair->clone()));
  const auto x = torch::ones({1, 2});
  EXPECT_TRUE(torch::equal(by_method(x), pair(x)));
  EXPECT_EQ(calls, 4);
  {
    torch::NoGradGuard no_grad;
    by_method->a->weight.zero_();
  }
  EXPECT_FALSE(torch::equal(by_method(x), pair(x)));

  pair.register_forward_hook([&](auto&...) { calls += 100; });
  EXPECT_ERROR(UsageError, pair->clone(), "tessera::clone(model)");
  calls = 0;
  auto copy = clone(pair);
  copy(x);
  EXPECT_EQ(calls, 102);
  auto handle = pair->a.register_forward_hook([](auto&...) {}, {.not_cloneable = "it counts ranks"});
  EXPECT_ERROR(UsageError, clone(pair), "module 'a'", "it counts ranks");
}

}  // namespace
}  // namespace tessera
