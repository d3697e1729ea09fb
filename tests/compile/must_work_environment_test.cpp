// What changes around a compiled step between calls: the step equals eager mode, or is refused with a reason.
#include "tessera/compile/api/compile.h"
#include "tessera/models/mlp.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"

#include "same_as_eager.h"
#include "train_step.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <random>

namespace tessera {
namespace {

using models::MLP;
using namespace same_as_eager;

TEST(MustWork, ZeroGradOutsideOfTheStep) {
  for (const bool to_none : {true, false})
    for (const bool steps : {true, false})
      expect_same_calls(
          [=](const bool compiled) {
            MLP model(models::mlp_module());
            auto opt =
                std::make_shared<optim::SGD>(model->parameters(), optim::SGD::Options{.lr = 0.1, .momentum = 0.9});
            auto step = as_is_or_compiled(
                [=](auto& m, auto& o, const at::Tensor& x) {
                  auto loss = m(x).pow(2).mean();
                  loss.backward();
                  if (steps) o.step();
                  return loss.detach();
                },
                compiled);
            return [=](int call) mutable {
              const auto loss = step(model, *opt, torch::randn({8, 10}));
              if (call != 1) opt->zero_grad(to_none);
              return with_module(loss, *model);
            };
          },
          5);
}

TEST(MustWork, CopyCalledBeforeTheOriginal) {
  auto step = compile([](const at::Tensor& x) { return std::vector<at::Tensor>{x + 1, x * 2}; }, quick());
  auto copy = step;
  const auto x = torch::randn({3});
  for (auto* each : {&copy, &step, &copy}) {
    const auto found = (*each)(x);
    ASSERT_EQ(found.size(), 2);
    EXPECT_TRUE(equal_bits(found[0], x + 1));
    EXPECT_TRUE(equal_bits(found[1], x * 2));
  }
}

TEST(MustWork, ResultVectorWhoseLengthChanges) {
  expect_same_calls(
      [](const bool compiled) {
        auto step = as_is_or_compiled(
            [](const at::Tensor& x) {
              std::vector<at::Tensor> parts;
              for (int64_t i = 0; i < x.size(0); i++) parts.push_back(x[i] * 2);
              return parts;
            },
            compiled);
        const std::vector<int64_t> rows = {2, 3, 2, 1, 3};
        return [=](int call) mutable { return step(torch::randn({rows[static_cast<size_t>(call)], 4})); };
      },
      5);
}

// Each iteration frees the model and the optimizer; the next ones get the same addresses.
TEST(MustWork, NewModelAndOptimizerAtTheSameAddress) {
  expect_same_calls(
      [](const bool compiled) {
        auto step = as_is_or_compiled(train_step, compiled);
        struct Training {
          MLP model{models::mlp_module()};
          optim::AdamW opt;
          explicit Training(double lr) : opt(model->parameters(), optim::AdamW::Options{.lr = lr}) {}
        };
        auto memory = std::make_shared<std::optional<Training>>();
        return [=](int call) mutable {
          memory->reset();
          memory->emplace(0.01 * (call + 1));
          at::Tensor loss;
          for (int i = 0; i < 3; i++) loss = step((*memory)->model, (*memory)->opt, torch::randn({8, 10}));
          return with_module(loss, *(*memory)->model);
        };
      },
      4);
}

TEST(MustWork, IdentityStep) {
  auto step = compile([](const at::Tensor& x) { return x; }, quick());
  for (int i = 0; i < 3; i++) {
    const auto x = torch::randn({3});
    EXPECT_TRUE(step(x).is_alias_of(x)) << i;
    EXPECT_TRUE(equal_bits(step(x), x)) << i;
  }
  auto parts = compile([](const at::Tensor& x, at::Tensor y) { return std::make_tuple(y, x, x); }, quick());
  for (int i = 0; i < 3; i++) {
    const auto x = torch::randn({3}), y = torch::randn({2, 2});
    const auto [a, b, c] = parts(x, y);
    EXPECT_TRUE(equal_bits(a, y) && equal_bits(b, x) && equal_bits(c, x)) << i;
  }
}

// Random changes of gradients between calls, where the step adds to them.
TEST(MustWork, GradientsChangedOutsideOfTheStep) {
  for (const bool captured : {false, true})
    for (const bool adam : {false, true})
      for (unsigned seed = 0; seed < 3; seed++)
        expect_same_calls(
            [=](const bool compiled) {
              MLP model(models::mlp_module());
              std::shared_ptr<optim::Optimizer> opt;
              if (adam)
                opt = std::make_shared<optim::AdamW>(model->parameters(), optim::AdamW::Options{.lr = 0.01});
              else
                opt = shared_sgd(model);
              auto step = as_is_or_compiled(
                  [=](auto& m, auto& o, const at::Tensor& x) mutable {
                    auto loss = (captured ? model : m)(x).pow(2).mean();
                    loss.backward();
                    if (x.size(0) == 8) (captured ? *opt : o).step();
                    return loss.detach();
                  },
                  compiled);
              std::mt19937 random(seed);
              MLP other(models::mlp_module());
              auto held = std::make_shared<Tensors>();
              return [=](int) mutable {
                const auto params = model->parameters();
                const auto& p = params[random() % params.size()];
                auto& one = p.mutable_grad();
                switch (random() % 7) {
                  case 0:
                    opt->zero_grad();
                    break;
                  case 1:
                    opt->zero_grad(false);
                    break;
                  case 2:
                    one.reset();
                    break;
                  case 3:
                    one = torch::ones_like(p);
                    break;
                  case 4:
                    held->push_back(one);
                    break;
                  default:
                    break;
                }
                const auto x = torch::randn({random() % 2 ? 8 : 4, 10});
                auto all = with_module(captured ? step(other, *opt, x) : step(model, *opt, x), *model);
                all.insert(all.end(), held->begin(), held->end());
                return all;
              };
            },
            8);
}

// The variable is captured by reference and gets a new tensor in every call.
TEST(MustWork, DetachedResultCarriedAcrossCallsIsRefused) {
  auto h = torch::zeros({3});
  auto step = compile(
      [&](const at::Tensor& x) {
        auto y = (x + h).sin();
        h = y.detach();
        return y.sum();
      },
      quick());
  EXPECT_ERROR(UsageError, step(torch::ones({3})), "variable", "h.copy_(y)", "argument");
  EXPECT_TRUE(equal_bits(h, torch::zeros({3})));
}

TEST(MustWork, DetachedResultCarriedAcrossCalls) {
  for (const bool two : {false, true})
    expect_same_calls(
        [=](const bool compiled) {
          MLP model(models::mlp_module());
          struct State {
            at::Tensor h, c;
          };
          auto state = std::make_shared<State>(State{torch::zeros({8, 10}), torch::zeros({8, 10})});
          auto step = as_is_or_compiled(
              [=](const at::Tensor& x) mutable {
                auto y = model(x + state->h) * 0.5;
                auto loss = y.pow(2).mean();
                loss.backward();
                if (two) {
                  auto c = state->c * 0.5 + y;
                  state->c = c.detach();
                }
                state->h = y.detach();
                return loss.detach();
              },
              compiled, {.codegen = false, .fullgraph = false});
          return [=](int call) mutable {
            if (call == 4) state->h = torch::ones({8, 10});
            auto loss = step(torch::randn({8, 10}));
            auto all = with_module(loss, *model);
            all.push_back(state->h);
            all.push_back(state->c);
            return all;
          };
        },
        7);
}

TEST(MustWork, CompiledFunctionInsideACompiledStep) {
  expect_same_calls(
      [](const bool compiled) {
        MLP model(models::mlp_module());
        auto opt = shared_sgd(model);
        auto scale = as_is_or_compiled([](const at::Tensor& x) { return x * 2 + 1; }, compiled);
        auto forward = std::make_shared<decltype(compile(model, quick()))>(compile(model, quick()));
        auto step = as_is_or_compiled(
            [=](auto& m, auto& o, const at::Tensor& x) mutable {
              o.zero_grad();
              const auto scaled = scale(x);
              auto loss = (compiled ? (*forward)(scaled) : m(scaled)).pow(2).mean();
              loss.backward();
              o.step();
              return scale(loss.detach());
            },
            compiled);
        return [=](int) mutable { return with_module(step(model, *opt, torch::randn({8, 10})), *model); };
      },
      4);
}

// Sizes, strides or memory of an argument or a captured tensor that the step changes in place.
TEST(MustWork, TransposeResizeAndSetDataOnArguments) {
  const auto refused = [](auto step, const char* op) {
    SCOPED_TRACE(op);
    const auto x = torch::arange(6, torch::kFloat).view({2, 3});
    const auto before = x.clone();
    const auto memory = x.data_ptr();
    auto compiled = compile(step, quick());
    EXPECT_ERROR(UsageError, compiled(x), "in place", "argument 0", "[2, 3]");
    EXPECT_TRUE(equal_bits(x, before));
    EXPECT_EQ(x.data_ptr(), memory);
    EXPECT_TRUE(x.is_contiguous());
    auto eager = compile(step, {.codegen = false, .fullgraph = false});
    const auto y = before.clone(), z = before.clone();
    EXPECT_TRUE(equal_bits(eager(y), step(z)));
    EXPECT_TRUE(equal_bits(y, z));
  };
  refused([](at::Tensor x) { return x.t_().sum(0); }, "t_");
  struct TransposingImpl : torch::nn::Module {
    at::Tensor forward(at::Tensor x) { return x.t_() * 2; }
  };
  auto module = compile(torch::nn::ModuleHolder<TransposingImpl>(std::make_shared<TransposingImpl>()), quick());
  const auto given = torch::ones({2, 3});
  EXPECT_ERROR(UsageError, module(given), "in place", "argument 0");
  EXPECT_EQ(given.sizes(), at::IntArrayRef({2, 3}));
  refused([](at::Tensor x) { return x.resize_({3}).sum(); }, "resize_");
  refused(
      [](at::Tensor x) {
        x.set_data(x.detach() + 1);
        return x.sum();
      },
      "set_data");
  refused([](at::Tensor x) { return x.unsqueeze_(0).sum(); }, "unsqueeze_");
  const auto captured = torch::arange(6, torch::kFloat).view({2, 3});
  auto step = compile([captured](const at::Tensor& x) { return captured.t_().sum() + x; }, quick());
  EXPECT_ERROR(UsageError, step(torch::ones({1})), "in place", "captured", "[2, 3]");
  EXPECT_EQ(captured.sizes(), at::IntArrayRef({2, 3}));
}

TEST(MustWork, ConjAndNegBits) {
  expect_same_calls(
      [](const bool compiled) {
        auto step = as_is_or_compiled(
            [](const at::Tensor& x, const at::Tensor& y) {
              const auto z = x.conj() * y;
              return std::vector<at::Tensor>{z,
                                             x.conj(),
                                             at::real(z).clone(),
                                             at::imag(x.conj()).clone(),
                                             y + 1,
                                             at::view_as_real(at::resolve_conj(x.conj())),
                                             x.clone()};
            },
            compiled);
        return [=](int call) mutable {
          const auto x = torch::randn({2, 3}, torch::kComplexFloat), y = torch::randn({2, 3}, torch::kComplexFloat);
          const auto neg = at::_neg_view(torch::randn({2, 3}));
          switch (call) {
            case 0:
            case 2:
              return step(x, y);
            case 1:
            case 3:
              return step(x.conj(), y);
            case 4:
              return step(x, y.conj());
            default:
              return step(x, call == 5 ? neg : neg.neg());
          }
        };
      },
      7);
}

TEST(MustWork, AutocastToggledOutside) {
  expect_same_calls(
      [](const bool compiled) {
        auto step = as_is_or_compiled([](const at::Tensor& x, const at::Tensor& y) { return x.mm(y); }, compiled);
        return [=](int call) mutable {
          const bool was = at::autocast::is_autocast_enabled(at::kCPU);
          const auto dtype = at::autocast::get_autocast_dtype(at::kCPU);
          at::autocast::set_autocast_enabled(at::kCPU, call > 0 && call != 3);
          at::autocast::set_autocast_dtype(at::kCPU, call == 2 || call == 4 ? at::kHalf : at::kBFloat16);
          auto result = step(torch::randn({4, 4}), torch::randn({4, 4}));
          at::autocast::clear_cache();
          at::autocast::set_autocast_enabled(at::kCPU, was);
          at::autocast::set_autocast_dtype(at::kCPU, dtype);
          return Tensors{result};
        };
      },
      6);
}

// Autocast keeps casts of parameters. Below autograd, the second trace would get those that the first has made.
TEST(MustWork, AutocastBelowAutograd) {
  expect_same_calls(
      [](const bool compiled) {
        MLP model(models::mlp_module());
        auto step = as_is_or_compiled([](auto& m, const at::Tensor& x) { return m(x); }, compiled);
        return [=](int) mutable {
          const at::AutoDispatchBelowAutograd below;
          at::autocast::set_autocast_enabled(at::kCPU, true);
          const auto y = step(model, torch::randn({8, 10}));
          at::autocast::clear_cache();
          at::autocast::set_autocast_enabled(at::kCPU, false);
          return Tensors{y};
        };
      },
      4);
}

TEST(MustWork, ParametersFrozenOrUnfrozenBetweenCalls) {
  for (const bool captured : {false, true})
    expect_same_calls(
        [=](const bool compiled) {
          MLP model(models::mlp_module());
          auto opt = shared_sgd(model);
          auto step = as_is_or_compiled(
              [=](auto& m, auto& o, const at::Tensor& x) mutable {
                o.zero_grad();
                auto loss = (captured ? model : m)(x).pow(2).mean();
                loss.backward();
                o.step();
                return loss.detach();
              },
              compiled);
          MLP other(models::mlp_module());
          auto other_opt = shared_sgd(other);
          return [=](int call) mutable {
            const auto params = model->parameters();
            if (call == 1) params[0].set_requires_grad(false), params[0].mutable_grad().reset();
            if (call == 2) params[0].set_requires_grad(true), params[3].set_requires_grad(false);
            if (call == 3) params[3].set_requires_grad(true);
            const auto x = torch::randn({8, 10});
            const auto loss = captured ? step(other, *opt, x) : step(model, *opt, x);
            return with_module(loss, *model);
          };
        },
        5);
}

TEST(MustWork, ModelToDouble) {
  for (const bool captured : {false, true})
    expect_same_calls(
        [=](const bool compiled) {
          MLP model(models::mlp_module());
          auto opt = shared_sgd(model);
          auto step = as_is_or_compiled(
              [=](auto& m, const at::Tensor& x) mutable {
                auto& used = captured ? model : m;
                auto loss = used(x.to(used->parameters()[0].scalar_type())).pow(2).mean();
                loss.backward();
                opt->step();
                return loss.detach();
              },
              compiled);
          MLP other(models::mlp_module());
          return [=](int call) mutable {
            opt->zero_grad();
            if (call == 2) model->to(torch::kDouble);
            if (call == 4) model->to(torch::kFloat);
            return with_module(step(captured ? other : model, torch::randn({8, 10})), *model);
          };
        },
        6);
}

}  // namespace
}  // namespace tessera
