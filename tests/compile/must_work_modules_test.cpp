// Modules and ops of LibTorch in compiled train steps: equal to eager mode, or refused with a reason.
#include "tessera/base/detail/libtorch_compat.h"
#include "tessera/compile/api/compile.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"

#include "same_as_eager.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

namespace tessera {
namespace {

using same_as_eager::as_is_or_compiled;
using same_as_eager::equal_bits;
using same_as_eager::expect_same_calls;
using same_as_eager::quick;
using same_as_eager::with_module;

// Trains make_model() with AdamW by `loss_of(model, x)`, eager and compiled.
template <class MakeModel, class LossOf>
void expect_same_module_training(const MakeModel& make_model, const LossOf& loss_of, const std::vector<int64_t>& shape,
                                 const CompileOptions& options = quick()) {
  expect_same_calls(
      [&](const bool compiled) {
        auto model = make_model();
        auto opt = std::make_shared<optim::AdamW>(model->parameters(), optim::AdamW::Options{.lr = 0.01});
        auto step = as_is_or_compiled(
            [=](auto& m, auto& o, const at::Tensor& x) mutable {
              o.zero_grad();
              auto loss = loss_of(m, x);
              loss.backward();
              o.step();
              return loss.detach();
            },
            compiled, options);
        return [=](int call) mutable {
          if (call == 3) model->eval();
          auto loss = step(model, *opt, torch::randn(shape));
          return with_module(loss, *model);
        };
      },
      4);
}

TEST(MustWork, TrainingOfLSTM) {
  for (const bool generated : {false, true})
    expect_same_module_training(
        [] { return torch::nn::LSTM(torch::nn::LSTMOptions(4, 5).num_layers(2).dropout(0.2).bidirectional(true)); },
        [](auto& m, const at::Tensor& x) {
          auto [y, state] = m(x);
          return y.pow(2).mean() + std::get<1>(state).sum() * 0.1;
        },
        {3, 2, 4}, {.codegen = generated});
}

TEST(MustWork, TrainingOfGRU) {
  expect_same_module_training([] { return torch::nn::GRU(torch::nn::GRUOptions(4, 5).num_layers(2)); },
                              [](auto& m, const at::Tensor& x) {
                                auto [y, h] = m(x);
                                return y.pow(2).mean() + h.sum() * 0.1;
                              },
                              {3, 2, 4});
}

TEST(MustWork, MultiheadAttention) {
  for (const bool weights : {false, true})
    expect_same_module_training(
        [] { return torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 2).dropout(0.1)); },
        [=](auto& m, const at::Tensor& x) {
          auto [y, w] = m(x, x, x, torch::Tensor(), weights);
          return w.defined() ? y.pow(2).mean() + w.pow(2).sum() : y.pow(2).mean();
        },
        {3, 2, 8});
}

TEST(MustWork, MultiheadAttentionWithMasks) {
  expect_same_module_training(
      [] { return torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 2).add_bias_kv(true)); },
      [](auto& m, const at::Tensor& x) {
        const auto padding = x.select(2, 0).t() > 1;
        const auto causal = torch::ones({3, 3}, torch::kBool).triu(1);
        auto [y, w] = m(x, x, x, padding, true, causal);
        return y.pow(2).mean();
      },
      {3, 2, 8});
}

TEST(MustWork, TransformerEncoderLayer) {
  const CompileScope strict({.numerics = Numerics::Strict});  // equal bits
  for (const bool generated : {false, true})
    expect_same_module_training(
        [] {
          return torch::nn::TransformerEncoderLayer(
              torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.1));
        },
        [](auto& m, const at::Tensor& x) { return m(x).pow(2).mean(); }, {3, 2, 8}, {.codegen = generated});
}

TEST(MustWork, TransformerEncoder) {
  expect_same_module_training(
      [] {
        return torch::nn::TransformerEncoder(torch::nn::TransformerEncoderOptions(
            torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0), 2));
      },
      [](auto& m, const at::Tensor& x) {
        return m(x, torch::nn::TransformerImpl::generate_square_subsequent_mask(3)).pow(2).mean();
      },
      {3, 2, 8});
}

TEST(MustWork, IndexWithIntegerTensors) {
  using torch::indexing::None;
  using torch::indexing::Slice;
  expect_same_calls(
      [](const bool compiled) {
        auto w = torch::randn({5, 4, 3}, torch::requires_grad());
        auto step = as_is_or_compiled(
            [w](const at::Tensor& rows, const at::Tensor& columns) mutable {
              w.mutable_grad().reset();
              auto picked = w.index({rows, columns});
              auto spread = w.index({Slice(), columns, None, rows.remainder(3)});
              auto last = w.index({torch::indexing::Ellipsis, columns.remainder(3)});
              (picked.sum() + spread.pow(2).sum() + last.sum()).backward();
              const at::NoGradGuard no_grad;
              auto copy = w.clone();
              copy.index_put_({rows}, torch::zeros({4, 3}));
              copy.index_put_({rows, columns}, torch::ones({2, 3}), true);
              copy.index_put_({Slice(), columns}, 2);
              return std::vector<at::Tensor>{picked.detach(), spread.detach(), copy, w.take(rows)};
            },
            compiled);
        return [=](int) mutable {
          auto found = step(torch::randint(5, {2}), torch::randint(4, {2}));
          found.push_back(w.grad());
          return found;
        };
      },
      4);
}

// A mask gives a shape that depends on values.
TEST(MustWork, IndexWithAMaskIsRefused) {
  auto step = compile([](const at::Tensor& x) { return x.index({x > 0}).sum(); }, quick());
  EXPECT_ERROR(UsageError, step(torch::randn({4})), "depends on values", "torch::where");
}

TEST(MustWork, SparseEmbeddingsAreRefused) {
  torch::nn::Embedding model(torch::nn::EmbeddingOptions(5, 3).sparse(true));
  auto step = compile(
      [](auto& m, const at::Tensor& x) {
        auto loss = m(x).sum();
        loss.backward();
        return loss.detach();
      },
      quick());
  EXPECT_ERROR(UsageError, step(model, torch::tensor({1, 2})), "sparse gradient", "sparse(false)");
  EXPECT_FALSE(model->weight.grad().defined());
  auto product = compile([](const at::Tensor& a) { return a.to_sparse().mm(a); }, quick());
  EXPECT_ERROR(UsageError, product(torch::eye(3)), "Sparse", "outside of the step");
}

TEST(MustWork, TensorSplitWithATensorIsRefused) {
  if (!libtorch::kAtLeast213) GTEST_SKIP() << "LibTorch before 2.13 cannot refuse access to memory for a while";
  auto step =
      compile([](const at::Tensor& x, const at::Tensor& at) { return x.tensor_split(at, 0)[0].sum(); }, quick());
  const auto found = testing::error_message<UsageError>([&] { step(torch::randn({6}), torch::tensor({2, 4})); });
  EXPECT_CONTAINS(found, "tensor_split");
  EXPECT_CONTAINS(found, "depends on values");
}

// Pointers to memory bypass the ops, so that the tracer sees neither reads nor writes.
TEST(MustWork, AccessorReadsAreRefused) {
  if (!libtorch::kAtLeast213) GTEST_SKIP() << "LibTorch before 2.13 cannot refuse access to memory for a while";
  const auto refused = [](auto step, const char* what) {
    SCOPED_TRACE(what);
    const auto x = torch::ones({2, 3});
    auto compiled = compile(step, quick());
    EXPECT_ERROR(UsageError, compiled(x), "depends on values", "outside of the step");
    EXPECT_EQ(x.data_ptr<float>()[0], 1);  // works again
    auto eager = compile(step, {.codegen = false, .fullgraph = false});
    EXPECT_TRUE(equal_bits(eager(x), step(x)));
  };
  refused([](const at::Tensor& x) { return x * x.accessor<float, 2>()[0][1]; }, "accessor of an argument");
  refused(
      [](const at::Tensor& x) {
        const auto y = x + 1;
        return x * y.accessor<float, 2>()[0][1];
      },
      "accessor");
  refused([](const at::Tensor& x) { return x * x.mul(2).const_data_ptr<float>()[0]; }, "const_data_ptr");
  refused(
      [](const at::Tensor& x) {
        auto y = x * 2;
        y.data_ptr<float>()[0] = 7;
        return y;
      },
      "data_ptr written");
  refused([](const at::Tensor& x) { return x * (x + 1).view({6})[2].item<float>(); }, "item");
}

// torch::tensor fills memory without an op.
TEST(MustWork, TensorsOfNumbersMadeInTheStep) {
  expect_same_calls(
      [](const bool compiled) {
        auto step = as_is_or_compiled(
            [](const at::Tensor& x) {
              auto list = torch::tensor(std::vector<float>{1, 2, 3});
              auto written = torch::tensor(std::vector<float>{1, 2, 3});
              written.mul_(x);
              auto order = torch::tensor(std::vector<int64_t>{2, 0, 1});
              std::vector<float> numbers = {4, 5, 6};
              const auto blob = torch::from_blob(numbers.data(), {3});
              return std::vector<at::Tensor>{x * list,
                                             written,
                                             x.index_select(0, order),
                                             x + torch::tensor(3.0),
                                             x + torch::tensor({1.0f, 5.0f, 2.0f}),
                                             torch::tensor({4, 5}),
                                             torch::full({2}, 3) + torch::arange(2),
                                             x * torch::scalar_tensor(2)};
            },
            compiled);
        return [=](int) mutable { return step(torch::randn({3})); };
      },
      3);
}

// An op that writes to arguments and also returns new tensors.
TEST(MustWork, AnOpThatWritesAnArgumentAndReturnsNewTensors) {
  const auto f = [](const at::Tensor& x) {
    auto mean = torch::zeros({5}), variance = torch::ones({5});
    const auto y = std::get<0>(at::_native_batch_norm_legit(x, {}, {}, mean, variance, true, 0.1, 1e-5));
    return y + mean + variance;
  };
  auto step = compile(f, {.captures = Captures::None});
  for (int call = 0; call < 3; call++) {
    const auto x = torch::randn({3, 5});
    EXPECT_TRUE(at::equal(step(x), f(x))) << call;
  }
}

}  // namespace
}  // namespace tessera
