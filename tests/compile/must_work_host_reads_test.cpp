// Ops that depend on values, in compiled steps: cases whose answer is the same in every run, or that a run can check.
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/holder.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include "same_as_eager.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using same_as_eager::equal_bits;
using same_as_eager::quick;

struct HostReadCase {
  const char* name;
  at::Tensor (*run)(const at::Tensor& x);
};

at::Tensor positive_definite(const at::Tensor& x) { return x.matmul(x.t()) + torch::eye(3); }

const HostReadCase kBackwardReads[] = {
    {"max", [](const at::Tensor& x) { return x.max(); }},
    {"min", [](const at::Tensor& x) { return x.min(); }},
    {"median", [](const at::Tensor& x) { return x.median(); }},
    {"nanmedian", [](const at::Tensor& x) { return x.nanmedian(); }},
    {"prod", [](const at::Tensor& x) { return x.prod(); }},
    {"prod of a dim", [](const at::Tensor& x) { return x.prod(1); }},
    {"cumprod", [](const at::Tensor& x) { return x.cumprod(1); }},
};
const HostReadCase kFactorizations[] = {
    {"inverse", [](const at::Tensor& x) { return torch::linalg_inv(positive_definite(x)); }},
    {"solve", [](const at::Tensor& x) { return torch::linalg_solve(positive_definite(x), x); }},
    {"cholesky", [](const at::Tensor& x) { return torch::linalg_cholesky(positive_definite(x)); }},
    {"old cholesky", [](const at::Tensor& x) { return positive_definite(x).cholesky(); }},
    {"eigenvalues", [](const at::Tensor& x) { return torch::abs(torch::linalg_eigvals(positive_definite(x))); }},
};
const HostReadCase kFixedSizes[] = {
    {"combinations", [](const at::Tensor& x) { return torch::combinations(x.flatten(), 2); }},
    {"ctc_loss",
     [](const at::Tensor& x) {
       return torch::ctc_loss(x.unsqueeze(1).log_softmax(-1), torch::ones({1, 2}, torch::kLong), at::IntArrayRef({3}),
                              at::IntArrayRef({1}));
     }},
    {"a mask of constants", [](const at::Tensor& x) { return x.masked_select(torch::arange(4) > 1); }},
    {"a number of constants", [](const at::Tensor& x) { return x * torch::arange(4).sum().item<int64_t>(); }},
};

// The value and the gradient.
Tensors with_gradient(const HostReadCase& each, const at::Tensor& x) {
  const auto y = each.run(x);
  return {y.detach(), torch::autograd::grad({y.sum()}, {x})[0]};
}

void expect_same_as_eager(const HostReadCase& each) {
  SCOPED_TRACE(each.name);
  auto step = compile([&each](const at::Tensor& x) { return with_gradient(each, x); },
                      {.codegen = false, .captures = Captures::None});
  const auto x = torch::empty({3, 4}).requires_grad_();
  for (int call = 0; call < 3; call++) {
    torch::manual_seed(static_cast<uint64_t>(call));
    x.data().copy_(torch::randn({3, 4}));
    same_as_eager::expect_equal_tensors(step(x), with_gradient(each, x), c10::str("call ", call));
  }
  EXPECT_EQ(step.cache().size(), 1u);
}

TEST(MustWork, FormulasOfBackwardThatAskForSpecialCases) {
  for (const auto& each : kBackwardReads) expect_same_as_eager(each);
}
TEST(MustWork, FactorizationsThatCheckForErrors) {
  for (const auto& each : kFactorizations) expect_same_as_eager(each);
}
TEST(MustWork, ValuesThatDependOnNoInput) {
  for (const auto& each : kFixedSizes) expect_same_as_eager(each);
}
TEST(MustWork, AStepWithoutOps) {
  int runs = 0;
  auto step = compile([&] { runs++; }, {.codegen = false, .captures = Captures::None});
  step();
  step();
  EXPECT_GE(runs, 1);
}

// A special case that comes later is an error, not another result.
TEST(MustWork, ASpecialCaseThatComesLaterIsRefused) {
  const auto compiled = [](const HostReadCase& each) {
    return compile([&each](const at::Tensor& x) { return with_gradient(each, x); },
                   {.codegen = false, .captures = Captures::None});
  };
  auto largest = compiled(kBackwardReads[0]);
  const auto x = torch::randn({3, 4}).requires_grad_();
  largest(x);
  auto product = compiled(kBackwardReads[4]);
  product(x);
  x.data().fill_(NAN);
  EXPECT_ERROR(UsageError, largest(x), "special case", "max()");
  x.data().zero_();
  EXPECT_ERROR(UsageError, product(x), "special case", "prod()");

  auto inverse =
      compile([](const at::Tensor& a) { return torch::linalg_inv(a); }, {.codegen = false, .captures = Captures::None});
  EXPECT_TRUE(at::equal(inverse(torch::eye(3)), torch::eye(3)));
  EXPECT_ERROR(c10::LinAlgError, inverse(torch::zeros({3, 3})), "singular");
}

// Results of collectives are unknown in a trace.
TEST(MustWork, OpsThatDependOnValuesOnRanks) {
  testing::run_ranks(2, [](testing::Rank&) {
    const auto mesh = init_device_mesh("cpu", {2}, {"x"});
    const auto on_ranks = [&](const HostReadCase& each) {
      auto step = compile([&each](const at::Tensor& x) { return with_gradient(each, x); },
                          {.codegen = false, .captures = Captures::None});
      at::Tensor x = distribute_tensor(torch::empty({3, 4}), mesh, {Shard(0)});
      x.set_requires_grad(true);
      for (int call = 0; call < 3; call++) {
        const auto values = torch::arange(12, torch::kFloat).sub(7.3 + call).div(5).sin().reshape({3, 4});
        x.data().copy_(distribute_tensor(values, mesh, {Shard(0)}));
        const auto found = step(x), wanted = with_gradient(each, x);
        for (size_t i = 0; i < wanted.size(); i++)
          EXPECT_TRUE(equal_bits(DTensor(found[i]).full_tensor(), DTensor(wanted[i]).full_tensor()))
              << each.name << ", call " << call << ", tensor " << i;
      }
    };
    for (const auto& each : kBackwardReads) on_ranks(each);
  });
}

struct DecoderImpl : torch::nn::Module {
  DecoderImpl() {
    embed = register_module("embed", torch::nn::Linear(4, 8));
    transformer = register_module(
        "transformer",
        torch::nn::Transformer(torch::nn::TransformerOptions(8, 2, 1, 1).dim_feedforward(16).dropout(0)));
  }
  at::Tensor forward(at::Tensor from, at::Tensor to) { return transformer(embed(from), embed(to)); }
  torch::nn::Linear embed{nullptr};
  torch::nn::Transformer transformer{nullptr};
};
TESSERA_MODULE(Decoder);

// nn::MultiheadAttention asks whether query, key and value are equal. Parameters are all-gathered, so a trace has zeros
// for both in the attention of the decoder to the encoder.
TEST(MustWork, TransformerOnRanks) {
  for (const int64_t ranks : {1, 2})
    testing::run_ranks(ranks, [&](testing::Rank&) {
      const auto mesh = init_device_mesh("cpu", {ranks}, {"dp"});
      std::vector<at::Tensor> losses[2];
      for (const bool compiled : {false, true}) {
        Decoder model;
        int64_t first = 0;  // ranks as threads share the default generator, so values are not drawn
        for (const auto& p : model->parameters()) {
          p.data().copy_(torch::arange(first, first + p.numel(), torch::kFloat).sin().div(3).reshape(p.sizes()));
          first++;
        }
        fully_shard(model, {.mesh = mesh});
        torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
        const auto train = [](auto& m, auto& o, const at::Tensor& from, const at::Tensor& to) {
          o.zero_grad();
          auto loss = m(from, to).pow(2).mean();
          loss.backward();
          o.step();
          return loss.detach();
        };
        auto step = compile(train, quick());
        for (int call = 0; call < 3; call++) {
          const auto from = torch::arange(24, torch::kFloat).add(call).sin().reshape({3, 2, 4}), to = from.cos();
          losses[compiled].push_back(compiled ? step(model, optimizer, from, to) : train(model, optimizer, from, to));
        }
      }
      for (size_t i = 0; i < 3; i++)
        EXPECT_TRUE(at::allclose(losses[1][i], losses[0][i], 1e-5, 1e-6)) << losses[1][i] << losses[0][i];
    });
}

// LibTorch's gelsy depends on uninitialised memory: two calls in eager mode differ in their last bits. The checks,
// which compare with eager mode, allow for it.
TEST(MustWork, LeastSquares) {
  auto step = compile([](const at::Tensor& a,
                         const at::Tensor& b) { return std::get<0>(at::linalg_lstsq(a, b, std::nullopt, "gelsy")); },
                      {.codegen = false, .check = 40});
  const auto a = torch::randn({5, 3}), b = torch::randn({5, 2});
  const auto wanted = std::get<0>(at::linalg_lstsq(a, b, std::nullopt, "gelsd"));
  for (int i = 0; i < 40; i++) {
    for (int n = 1; n < 40; n++) torch::full({1 + n % 12}, (i * 7 + n) % 3, at::kInt);  // other content of free memory
    EXPECT_TRUE(torch::allclose(step(a, b), wanted, 1e-4, 1e-5));
  }
}

}  // namespace
}  // namespace tessera
