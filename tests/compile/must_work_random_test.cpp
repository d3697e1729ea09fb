// Random numbers in compiled steps: generators of the user, seeds set in the step, dropout that is recomputed.
#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/random.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/testing/expect_error.h"

#include "same_as_eager.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using models::MLP;
using namespace same_as_eager;

TEST(MustWork, OwnGenerators) {
  expect_same_calls(
      [](const bool compiled) {
        auto first = at::detail::createCPUGenerator(3), second = at::detail::createCPUGenerator(4);
        auto step = as_is_or_compiled(
            [=](const at::Tensor& x) {
              auto a = torch::rand({3}, first), b = torch::empty_like(x).normal_(0, 1, second);
              auto c = torch::randn({3}), d = at::bernoulli(torch::full({3}, 0.5), first);
              return std::vector<at::Tensor>{a + x, b, c, d, torch::empty({3}).uniform_(0, 1, first)};
            },
            compiled);
        return [=](int call) mutable {
          if (call == 2) first.set_current_seed(9);
          auto found = step(torch::ones({3}));
          found.push_back(torch::rand({2}, first));  // both generators continue where the step left them
          found.push_back(torch::rand({2}, second));
          found.push_back(torch::rand({2}));
          return found;
        };
      },
      4);
}

TEST(MustWork, GeneratorAsAnArgument) {
  expect_same_calls(
      [](const bool compiled) {
        std::vector<at::Generator> generators = {at::detail::createCPUGenerator(3), at::detail::createCPUGenerator(4)};
        auto step = as_is_or_compiled(
            [](const at::Tensor& x, const at::Generator& g) { return x + torch::rand({3}, g); }, compiled);
        return [=](int call) mutable {
          auto& g = generators[static_cast<size_t>(call % 2)];
          return Tensors{step(torch::ones({3}), g), torch::rand({2}, g)};
        };
      },
      4);
}

TEST(MustWork, ManualSeedInside) {
  expect_same_calls(
      [](const bool compiled) {
        auto step = as_is_or_compiled(
            [](const at::Tensor& x) {
              auto before = torch::rand({3});
              torch::manual_seed(5);
              auto after = torch::rand({3}), mask = torch::dropout(x, 0.5, true);
              return std::vector<at::Tensor>{before, after, mask};
            },
            compiled);
        return [=](int call) mutable {
          if (call == 2) torch::manual_seed(8);
          auto found = step(torch::ones({6}));
          found.push_back(torch::rand({2}));
          return found;
        };
      },
      4);
}

// Without a draw after the seed: the state at the end of the step counts.
TEST(MustWork, ManualSeedAtTheEnd) {
  expect_same_calls(
      [](const bool compiled) {
        auto step = as_is_or_compiled(
            [](const at::Tensor& x) {
              auto y = x + torch::rand({3});
              torch::manual_seed(5);
              return y;
            },
            compiled);
        return [=](int call) mutable {
          torch::manual_seed(static_cast<uint64_t>(100 + call));
          auto found = step(torch::ones({3}));
          return Tensors{found, torch::rand({2})};
        };
      },
      3);
}

TEST(MustWork, SeedOfTesseraInside) {
  for (const bool rewinds : {true, false})
    expect_same_calls(
        [=](const bool compiled) {
          tessera::manual_seed(21);
          auto step = as_is_or_compiled(
              [=](const at::Tensor& x) {
                auto before = random::rand({3});
                tessera::manual_seed(rewinds ? 21 : 22);
                auto after = random::rand({3});
                at::Tensor scoped;
                {
                  const random::SeedScope scope(30);
                  scoped = random::randn({3});
                }
                return std::vector<at::Tensor>{before, after, scoped, random::dropout(x, 0.5, true)};
              },
              compiled);
          return [=](int call) mutable {
            if (call == 2) tessera::manual_seed(40);
            auto found = step(torch::ones({6}));
            found.push_back(random::rand({2}));
            return found;
          };
        },
        4);
}

// Backward runs the function again and must draw the same mask.
TEST(MustWork, CheckpointWithPlainDropout) {
  const CompileScope strict({.numerics = Numerics::Strict});  // equal bits
  for (const bool nested : {false, true})
    for (const bool generated : {false, true})
      expect_same_calls(
          [=](const bool compiled) {
            MLP model(models::mlp_module());
            auto step = as_is_or_compiled(
                [=](auto& m, const at::Tensor& x) mutable {
                  for (auto& p : m->parameters()) p.mutable_grad().reset();
                  const auto block = [&m](const at::Tensor& t) {
                    return torch::dropout(m(torch::dropout(t, 0.3, true)), 0.4, true);
                  };
                  auto y = checkpoint(block, x + torch::rand_like(x) * 0.1);
                  if (nested)
                    y = checkpoint([&](const at::Tensor& t) { return checkpoint(block, t * 2) + torch::rand_like(t); },
                                   y);
                  auto loss = torch::dropout(y, 0.5, true).pow(2).sum();
                  loss.backward();
                  return loss.detach() + torch::rand({1});
                },
                compiled, {.codegen = generated});
            return [=](int) mutable {
              auto loss = step(model, torch::randn({8, 10}));
              auto all = tensors_of_module(*model);
              all.push_back(loss);
              all.push_back(torch::rand({2}));
              return all;
            };
          },
          3);
}

struct DroppingImpl : torch::nn::Module {
  bool stream = false;
  torch::nn::Linear linear{nullptr};
  explicit DroppingImpl(bool stream_of_tessera) : stream(stream_of_tessera) {
    linear = register_module("linear", torch::nn::Linear(6, 6));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto block = [this](const at::Tensor& t) {
      return linear(stream ? random::dropout(t, 0.4, true) : torch::dropout(t, 0.4, true)).sin();
    };
    return checkpoint(block, checkpoint(block, x));
  }
};
TORCH_MODULE(Dropping);

// The state is saved by the forward program. Draws between forward and backward do not matter.
TEST(MustWork, CheckpointWithDropoutInACompiledModule) {
  expect_same_calls(
      [](const bool compiled) {
        Dropping model(false);
        auto forward = std::make_shared<decltype(compile(model, quick()))>(compile(model, quick()));
        return [=](int) mutable {
          model->zero_grad();
          auto y = compiled ? (*forward)(torch::ones({4, 6})) : model(torch::ones({4, 6}));
          const auto between = torch::rand({3});
          y.pow(2).sum().backward();
          auto all = tensors_of_module(*model);
          all.insert(all.end(), {y, between, torch::rand({3})});
          return all;
        };
      },
      3);
  auto forward = compile(Dropping(true), quick());
  EXPECT_ERROR(UsageError, forward(torch::ones({4, 6})), "random stream", "train step");
}

// The same in eager mode: gradients with and without the checkpoint are equal.
TEST(MustWork, CheckpointWithPlainDropoutInEagerMode) {
  MLP model(models::mlp_module());
  Tensors wanted;
  for (const bool checkpointed : {false, true}) {
    torch::manual_seed(3);
    const auto x = torch::randn({8, 10});
    const auto block = [&](const at::Tensor& t) {
      return torch::dropout(model(torch::dropout(t, 0.3, true)), 0.4, true);
    };
    auto y = checkpointed ? checkpoint(block, x) : block(x);
    model->zero_grad();
    (y.pow(2).sum() + torch::rand({})).backward();
    auto found = tensors_of_module(*model);
    found.push_back(torch::rand({2}));
    if (checkpointed) same_as_eager::expect_equal_tensors(found, wanted, "checkpointed");
    wanted = found;
  }
}

}  // namespace
}  // namespace tessera
