// deferred_init() and materialize() on one rank.
#include "tessera/nn/deferred_init.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/modules.h"
#include "tessera/testing/expect_error.h"
#include "tests/nn/tiny_llama.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::error_message;

struct OneImpl : torch::nn::Module {
  at::Tensor value;
  explicit OneImpl(const std::function<at::Tensor()>& make) { value = register_buffer("value", make()); }
};
TORCH_MODULE(One);

// The result of `make` in deferred_init, after materialize().
at::Tensor deferred_then_materialized(const std::function<at::Tensor()>& make) {
  auto module = deferred_init([&] { return One(make); });
  EXPECT_TRUE(is_deferred(module->value));
  EXPECT_TRUE(module->value.is_meta());
  materialize(module);
  EXPECT_FALSE(is_deferred(module->value));
  return module->value;
}

void expect_equal(const at::Tensor& got, const at::Tensor& expected) {
  EXPECT_EQ(got.device(), expected.device());
  EXPECT_EQ(got.scalar_type(), expected.scalar_type());
  EXPECT_EQ(got.strides(), expected.strides());
  EXPECT_TRUE(torch::equal(got, expected)) << got << "\nexpected\n" << expected;
}

// materialize() must compute the same tensor as `make` computes directly.
void expect_same_as_eager(const std::function<at::Tensor()>& make) {
  expect_equal(deferred_then_materialized(make), make());
}

TEST(DeferredInit, LinearUsesTesserasRandomNumbers) {
  manual_seed(5);
  auto linear = deferred_init([] { return torch::nn::Linear(7, 3); });
  const auto handle = linear->weight;
  EXPECT_TRUE(is_deferred(linear->weight) && linear->weight.requires_grad() && linear->weight.is_leaf());
  EXPECT_EQ(random::state().offset, 2u);
  materialize(linear);
  EXPECT_TRUE(handle.is_same(linear->weight));
  EXPECT_TRUE(linear->weight.is_cpu() && linear->weight.requires_grad() && linear->weight.is_leaf());

  manual_seed(5);
  auto weight = torch::empty({3, 7}), bias = torch::empty({3});
  const double bound = 1 / std::sqrt(7.0);
  random::uniform_(weight, -std::sqrt(3.0) * std::sqrt(2.0 / 6) / std::sqrt(7.0),
                   std::sqrt(3.0) * std::sqrt(2.0 / 6) / std::sqrt(7.0));
  random::uniform_(bias, -bound, bound);
  EXPECT_TRUE(torch::allclose(linear->weight, weight, 1e-6, 1e-7));
  EXPECT_TRUE(torch::equal(linear->bias, bias));

  torch::optim::SGD sgd(linear->parameters(), 0.1);
  linear(torch::ones({2, 7})).sum().backward();
  sgd.step();
  EXPECT_FALSE(torch::equal(linear->bias, bias));
}

TEST(DeferredInit, TensorsWithoutRandomNumbersEqualEagerOnes) {
  expect_same_as_eager([] { return torch::zeros({2, 3}); });
  expect_same_as_eager([] { return torch::full({2, 3}, 0.5, torch::kDouble); });
  expect_same_as_eager([] { return test::rope_table({.dim = 24, .context = 9}); });
  expect_same_as_eager([] { return torch::ones({5, 5}).tril(); });
  expect_same_as_eager([] { return torch::full({5, 5}, -1e9).triu(1); });
  expect_same_as_eager([] { return torch::tensor(3, torch::kLong); });
  expect_same_as_eager([] { return torch::arange(6).view({2, 3}).t(); });
  expect_same_as_eager([] { return torch::linspace(0, 1, 5).to(torch::kBFloat16); });
  expect_same_as_eager([] { return torch::zeros({3, 2, 4, 5}).to(at::MemoryFormat::ChannelsLast); });
  expect_same_as_eager([] { return torch::eye(4) * torch::tensor({1.0f, 2.0f, 3.0f, 4.0f}); });
  expect_same_as_eager([] { return torch::arange(4, torch::kFloat) + torch::tensor(std::vector<float>{1, 2, 3, 4}); });
}

TEST(DeferredInit, OpsWithoutAMetaKernelWork) {
  expect_same_as_eager([] { return torch::relu(torch::arange(-2, 3, torch::kFloat)); });
  expect_same_as_eager([] {
    const auto mask = torch::ones({4, 4}, torch::kBool).tril();
    return torch::where(mask, torch::zeros({4, 4}), torch::full({4, 4}, -1.0));
  });
  expect_same_as_eager([] {
    return torch::zeros({4, 4}).masked_fill(torch::ones({4, 4}, torch::kBool).triu(1), -1.0);
  });
  expect_same_as_eager([] { return torch::arange(5).index_select(0, torch::tensor({3, 1})); });
  expect_same_as_eager([] { return torch::nonzero(torch::arange(3)); });
  expect_same_as_eager([] { return torch::arange(-2, 3).abs(); });
  expect_same_as_eager([] {
    auto out = torch::empty({0});
    return torch::abs_out(out, torch::arange(-2, 3, torch::kFloat)).add_(1);
  });
  EXPECT_CONTAINS(error_message<UsageError>([] {
                    deferred_init([] { return torch::relu(torch::zeros({5000, 5000})); });
                  }),
                  "aten::relu has no kernel for the meta device, and its arguments, 100000000 bytes, are too large");
  // As large, but its decomposition has in-place ops only.
  deferred_init([] { return torch::zeros({5000, 5000}).masked_fill(torch::ones({5000, 5000}, torch::kBool), -1.0); });
}

TEST(DeferredInit, InPlaceWritesThroughViewsAreReplayed) {
  expect_same_as_eager([] {
    auto t = torch::ones({4, 3});
    t[2].fill_(0);
    t.slice(0, 0, 2).select(1, 1).mul_(5);
    const auto before = t.clone();
    t.t().add_(1);
    return t + before;
  });
  expect_same_as_eager([] {  // a view sees a later write to its base
    auto t = torch::ones({4, 3});
    auto view = t.view({12});
    t.zero_();
    return view;
  });
  expect_same_as_eager([] {
    auto t = torch::arange(6).view({2, 3}).clone();
    t.t_();
    t[0].zero_();
    return t;
  });
  expect_same_as_eager([] {
    auto t = torch::zeros({3});
    t.data().fill_(2);
    return t;
  });
}

TEST(DeferredInit, AnOverwrittenWriteIsNotReplayed) {
  auto calls = [](const std::function<at::Tensor()>& make) {
    auto module = deferred_init([&] { return One(make); });
    struct Count {
      int ops = 0;
    };
    static thread_local Count* count;
    Count mine;
    count = &mine;
    auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction&) {
                                               count->ops++;
                                               return std::unique_ptr<at::ObserverContext>();
                                             }).scopes({at::RecordScope::FUNCTION}));
    materialize(module);
    at::removeCallback(handle);
    return mine.ops;
  };
  const int once = calls([] { return torch::nn::init::normal_(torch::empty({3, 3})); });
  EXPECT_EQ(once, calls([] { return torch::nn::init::normal_(torch::nn::init::uniform_(torch::empty({3, 3}))); }));
  EXPECT_LT(once, calls([] { return torch::nn::init::normal_(torch::empty({3, 3})).mul_(2); }));
}

// Each random op reserves one offset of the random sequence when it is recorded.
TEST(DeferredInit, RandomValuesDoNotDependOnTheOrderOfMaterialize) {
  const std::vector<std::function<at::Tensor()>> fills = {
      [] {
        return torch::rand({3, 4});
      },
      [] {
        return torch::randn({3, 4});
      },
      [] {
        return torch::randint(5, {3, 4});
      },
      [] {
        return torch::empty({3, 4}).bernoulli_(0.3);
      },
      [] {
        return torch::bernoulli(torch::full({3, 4}, 0.3));
      },
      [] {
        return torch::rand_like(torch::zeros({3, 4}));
      },
      [] {
        return torch::normal(0.0, 1.0, {3, 4});
      },
      [] {
        return torch::empty({3, 4}).exponential_();
      },
      [] { return torch::randperm(12); },
      [] { return torch::multinomial(torch::ones({12}), 3); },
  };
  for (size_t i = 0; i < fills.size(); i++) {
    SCOPED_TRACE(i);
    manual_seed(3);
    const auto first = deferred_then_materialized(fills[i]);
    EXPECT_EQ(random::state().offset, 1u);
    manual_seed(3);
    auto both = deferred_init([&] { return std::pair<One, One>{One(fills[i]), One(fills[i])}; });
    materialize(both.second);  // in another order
    materialize(both.first);
    EXPECT_TRUE(torch::equal(both.first->value, first));
    EXPECT_FALSE(torch::equal(both.second->value, first));
  }
  manual_seed(3);
  const auto rand = deferred_then_materialized(fills[0]);
  manual_seed(3);
  EXPECT_TRUE(torch::equal(rand, random::rand({3, 4})));
  const auto permutation = deferred_then_materialized(fills[8]);
  EXPECT_TRUE(torch::equal(std::get<0>(permutation.sort()), torch::arange(12)));
}

template <class Module>
void expect_same_distribution(Module (*make)()) {
  manual_seed(1);
  auto deferred = deferred_init(make);
  auto real = make();
  materialize(deferred);
  const auto check = [](const auto& got, const auto& like) {
    ASSERT_EQ(got.size(), like.size());
    for (const auto& item : like) {
      const auto& t = got[item.key()];
      EXPECT_FALSE(t.is_meta()) << item.key();
      EXPECT_EQ(t.sizes(), item.value().sizes());
      EXPECT_EQ(t.scalar_type(), item.value().scalar_type());
      EXPECT_EQ(t.requires_grad(), item.value().requires_grad());
      // Different values of one distribution: compare their magnitudes.
      const auto largest = [](const at::Tensor& x) {
        return x.detach().to(torch::kDouble).abs().max().item().toDouble();
      };
      EXPECT_NEAR(largest(t), largest(item.value()), 0.5 * largest(item.value())) << item.key();
    }
  };
  check(deferred->named_parameters(), real->named_parameters());
  check(deferred->named_buffers(), real->named_buffers());
}

TEST(DeferredInit, TorchModulesHaveTheSameDistributions) {
  expect_same_distribution(+[] { return torch::nn::Linear(20, 30); });
  expect_same_distribution(+[] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(20, 30).padding_idx(4)); });
  expect_same_distribution(+[] { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({20})); });
  expect_same_distribution(+[] { return torch::nn::Conv2d(3, 20, 5); });
  expect_same_distribution(+[] { return torch::nn::BatchNorm2d(20); });
  expect_same_distribution(+[] { return torch::nn::MultiheadAttention(24, 3); });
  expect_same_distribution(+[] { return torch::nn::LSTM(20, 30); });
  expect_same_distribution(
      +[] { return torch::nn::Sequential(torch::nn::Linear(20, 30), torch::nn::GroupNorm(3, 30)); });
  expect_same_distribution(+[] { return nn::Linear(20, 30); });
  expect_same_distribution(+[] { return test::TinyLlama(test::LlamaSizes{.dim = 40, .ffn = 60, .vocab = 50}); });
  auto embedding = deferred_init([] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 3).padding_idx(4)); });
  materialize(embedding);
  EXPECT_TRUE(torch::equal(embedding->weight[4], torch::zeros({3})));
  EXPECT_TRUE(embedding->weight[3].abs().min().item<float>() > 0);

  auto lstm = deferred_init([] { return torch::nn::LSTM(4, 5); });
  materialize(lstm);
  EXPECT_EQ(std::get<0>(lstm(torch::ones({3, 1, 4}))).sizes(), (at::IntArrayRef{3, 1, 5}));
}

TEST(DeferredInit, TorchInitFunctionsWork) {
  const auto orthogonal = deferred_then_materialized([] { return torch::nn::init::orthogonal_(torch::empty({3, 5})); });
  EXPECT_TRUE(torch::allclose(orthogonal.mm(orthogonal.t()), torch::eye(3), 1e-5, 1e-5));
  expect_same_as_eager([] { return torch::nn::init::dirac_(torch::empty({3, 3, 5})); });
  expect_same_as_eager([] { return torch::nn::init::eye_(torch::empty({3, 4})); });
}

TEST(DeferredInit, TensorsThatShareMemoryShareItAfterMaterialize) {
  struct TiedImpl : torch::nn::Module {
    torch::nn::Linear a{nullptr}, b{nullptr};
    at::Tensor same, row;
    TiedImpl() {
      a = register_module("a", torch::nn::Linear(3, 3));
      b = register_module("b", torch::nn::Linear(3, 3));
      b->weight.set_data(a->weight);
      same = register_parameter("same", a->weight);
      torch::NoGradGuard no_grad;
      row = register_buffer("row", a->weight.detach()[1]);
    }
  };
  auto tied = deferred_init([] { return std::make_shared<TiedImpl>(); });
  materialize(*tied);
  EXPECT_TRUE(tied->same.is_same(tied->a->weight));
  EXPECT_TRUE(tied->b->weight.is_alias_of(tied->a->weight));
  torch::NoGradGuard no_grad;
  tied->a->weight.fill_(4);
  EXPECT_TRUE(torch::equal(tied->row, torch::full({3}, 4.0)));
  EXPECT_TRUE(torch::equal(tied->b->weight, torch::full({3, 3}, 4.0)));
}

TEST(DeferredInit, ASecondDeferredInitContinuesTheRecording) {
  auto linear = deferred_init([] { return torch::nn::Linear(3, 2); });
  deferred_init([&] {
    linear->to(torch::kBFloat16);
    torch::NoGradGuard no_grad;
    linear->bias.fill_(0.5);
  });
  EXPECT_TRUE(is_deferred(linear->weight));
  materialize(linear);
  EXPECT_TRUE(torch::equal(linear->bias, torch::full({2}, 0.5, torch::kBFloat16)));
  EXPECT_EQ(linear->weight.scalar_type(), torch::kBFloat16);
  EXPECT_TRUE(linear->weight.requires_grad());
}

TEST(DeferredInit, RealTensorsAreReadInMaterialize) {
  auto given = torch::arange(3, torch::kFloat);
  expect_equal(deferred_then_materialized([&] { return torch::zeros({3}).copy_(given); }), given);
  auto module = deferred_init([&] { return One([&] { return torch::ones({3}) * given; }); });
  given.add_(1);
  EXPECT_CONTAINS(error_message<UsageError>([&] { materialize(module); }),
                  "a real tensor of sizes [3] that the initialization reads was modified");
  EXPECT_TRUE(is_deferred(module->value));
  auto without = torch::empty({3}, torch::kMeta);
  auto reads = deferred_init([&] { return One([&] { return torch::ones({3}) * without; }); });
  EXPECT_CONTAINS(error_message<UsageError>([&] { materialize(reads); }), "on the meta device that was not made in");
  EXPECT_CONTAINS(error_message<UsageError>([&] { deferred_init([&] { given.copy_(torch::ones({3})); }); }),
                  "aten::copy_ writes a deferred value to a real tensor");
}

// The requested device need not exist, because nothing is allocated on it.
TEST(DeferredInit, RecordsTheRequestedDevice) {
  struct Both : torch::nn::Module {
    at::Tensor on_cuda, on_cpu;
    Both() {
      const auto first = torch::zeros({3}, torch::kCUDA);
      on_cuda = register_buffer("on_cuda", torch::ones({3}, first.options()));  // the options contain meta
      on_cpu = register_buffer("on_cpu", on_cuda.to(torch::kCPU));              // a copy on every device
      on_cpu.add_(5);
    }
  };
  auto both = deferred_init([] { return std::make_shared<Both>(); });
  materialize(*both, torch::Device(torch::kCPU));
  expect_equal(both->on_cuda, torch::ones({3}));
  expect_equal(both->on_cpu, torch::full({3}, 6.0));
}

TEST(DeferredInit, SubmodulesCanBeMaterializedFirst) {
  auto model = deferred_init([] { return test::TinyLlama(test::LlamaSizes{}); });
  materialize(*model->tokens);
  EXPECT_FALSE(is_deferred(model->tokens->weight));
  const auto before = model->tokens->weight.clone();
  materialize(model);
  EXPECT_TRUE(torch::equal(model->tokens->weight, before));
  for (const auto& item : model->named_parameters()) EXPECT_FALSE(item.value().is_meta()) << item.key();
}

TEST(DeferredInit, Errors) {
  auto linear = deferred_init([] { return torch::nn::Linear(3, 2); });
  EXPECT_CONTAINS(error_message<UsageError>([&] {
                    linear(torch::ones({1, 3}));
                  }),
                  "on a tensor made in deferred_init, which has no values yet. Call materialize(module) first");
  EXPECT_CONTAINS(error_message<UsageError>([&] {
                    torch::NoGradGuard no_grad;
                    linear->bias.fill_(1);
                  }),
                  "aten::fill_.Scalar on a tensor made in deferred_init");
  EXPECT_CONTAINS(error_message([&] { linear->weight.data_ptr<float>()[0] = 1; }), "has no memory yet");
  EXPECT_CONTAINS(error_message<UsageError>([&] { linear->bias.detach()[0].item<float>(); }),
                  "aten::item needs the value of a tensor made in deferred_init");
  EXPECT_CONTAINS(error_message<UsageError>([&] { deferred_init([&] { materialize(linear); }); }),
                  "inside deferred_init");
  EXPECT_EQ(linear->weight.size(1), 3);
  materialize(linear);
  const auto before = linear->weight.clone();
  EXPECT_CONTAINS(error_message<UsageError>([&] { materialize(linear); }),
                  "materialize(Linear): no tensor is deferred ('weight' has values, for example): the module was "
                  "materialized before");
  EXPECT_TRUE(torch::equal(linear->weight, before));

  EXPECT_CONTAINS(error_message<UsageError>([] { deferred_init([] { return torch::zeros({1}).item<float>(); }); }),
                  "aten::item needs the value of a tensor made in deferred_init");
  EXPECT_CONTAINS(
      error_message<UsageError>([] { deferred_init([] { return torch::ones({2}).equal(torch::ones({2})); }); }),
      "aten::equal needs the value");
  EXPECT_CONTAINS(error_message([] { deferred_init([] {
                                       return at::tensor({1, 2});
                                     }); }),
                  "torch::tensor({...}) is a real tensor");
  EXPECT_CONTAINS(error_message<UsageError>([] { deferred_init([] { return torch::poisson(torch::ones({2})); }); }),
                  "aten::poisson generates random numbers that tessera::random does not support");
  EXPECT_CONTAINS(error_message<UsageError>([] {
                    deferred_init([] { return torch::empty({2}).uniform_(0, 1, at::detail::createCPUGenerator()); });
                  }),
                  "was given a generator");

  EXPECT_CONTAINS(error_message([] { deferred_init([] { torch::nn::Linear(2, 2)->weight.mul_(2); }); }),
                  "a leaf Variable that requires grad");
  EXPECT_CONTAINS(error_message<UsageError>([] { deferred_init([] { torch::nn::Linear(2, 2)->weight.normal_(); }); }),
                  "requires grad and would be overwritten");

  torch::nn::Linear meta(torch::nn::LinearOptions(2, 2));
  meta->to(torch::kMeta);
  EXPECT_CONTAINS(error_message<UsageError>([&] { materialize(meta); }),
                  "materialize(Linear): 'weight' is on the meta device but was not made in deferred_init");
  EXPECT_TRUE(meta->weight.is_meta());
  materialize(*std::make_shared<torch::nn::ReLUImpl>());  // nothing to do
}

TEST(DeferredInit, AnErrorInMaterializeLeavesTheModuleUnchanged) {
  auto given = torch::ones({3});
  struct TwoImpl : torch::nn::Module {
    at::Tensor first, second;
    explicit TwoImpl(const at::Tensor& given) {
      first = register_buffer("first", torch::ones({3}));
      second = register_buffer("second", torch::ones({3}) * given);
    }
  };
  auto two = deferred_init([&] { return std::make_shared<TwoImpl>(given); });
  given.add_(1);
  const auto message = error_message<UsageError>([&] { materialize(*two); });
  EXPECT_CONTAINS(message, "that the initialization reads was modified");
  EXPECT_CONTAINS(message, "aten::mul.Tensor");
  EXPECT_CONTAINS(message, "while filling 'second'");
  EXPECT_TRUE(is_deferred(two->first) && is_deferred(two->second));
}

}  // namespace
}  // namespace tessera
