// Memory of collectives in flight: other collectives and ops may still read the input of a collective, so no pass may
// let it be written before they are done.
#include "tessera/comm/functional_collectives.h"
#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include "expect_rewrite.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

// Two all-reduces of %1 are in flight, and then an op reads %1. The last all-reduce is the last one that uses it.
constexpr const char* kReadInFlight = R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = tessera.all_reduce(%1, "sum", @dp)
%3: f32[4] in %2 = tessera.wait(%2!, @dp)
%4: f32[4] = tessera.all_reduce(%1, "sum", @dp)
%5: f32[4] = aten.exp(%1)
%6: f32[4] in %4 = tessera.wait(%4!, @dp)
%7: f32[4] = aten.mul.Tensor(%5, %6)
return %3
return %7
)";
constexpr const char* kTwoInFlight = R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = tessera.all_reduce(%1, "sum", @dp)
%3: f32[4] = tessera.all_reduce(%1, "sum", @dp)
%4: f32[4] in %2 = tessera.wait(%2!, @dp)
%5: f32[4] in %3 = tessera.wait(%3!, @dp)
return %4
return %5
)";
constexpr const char* kTwiceInAList = R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
[%2: f32[4], %3: f32[4]] = tessera.all_reduce_coalesced([%1, %1], "sum", @dp)
%4: f32[4] in %2 = tessera.wait(%2!, @dp)
%5: f32[4] in %3 = tessera.wait(%3!, @dp)
return %4
return %5
)";

TEST(InFlightCollectives, AnInputThatOthersReadIsNotReducedInPlace) {
  for (const auto* text : {kReadInFlight, kTwoInFlight, kTwiceInAList})
    EXPECT_EQ(compiler::matches("in_place_collectives", text), 0) << text;
}

TEST(InFlightCollectives, VerifyFindsWritesOfTheirInputs) {
  auto program = compiler::parse(kTwoInFlight);
  verify(program);
  program = compiler::parse(R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = aten.neg(%0)
%2: f32[4] = tessera.all_reduce(%1, "sum", @dp)
%3: f32[4] in %1 = aten.exp_(%1!)
%4: f32[4] in %2 = tessera.wait(%2!, @dp)
return %4
)");
  EXPECT_ERROR(InternalError, verify(program), "%1 is written while a collective uses it");
}

// corrcoef of one row: the covariance c is partial, and the result is c / c. The numerator stays partial; the
// denominator is reduced, here and twice more in backward.
TEST(InFlightCollectives, APartialTensorDividedByItself) {
  torch::manual_seed(3);
  const auto values = torch::randn({3});
  testing::run_ranks(2, [&](testing::Rank&) {
    const auto mesh = init_device_mesh("cpu", {2}, {"x"});
    at::Tensor x = distribute_tensor(values.clone(), mesh, {Shard(0)});
    x.set_requires_grad(true);
    const auto divide = [](const at::Tensor& x) {
      const auto c = (x * x).sum(), y = c / c + torch::corrcoef(x);
      const auto gradient = torch::autograd::grad({y}, {x}, {torch::ones_like(y)})[0];
      return Tensors{y.detach(), gradient};
    };
    auto compiled = compile(divide, {.codegen = false, .verified = true, .captures = Captures::None});
    const auto wanted = divide(x);
    for (int call = 0; call < 3; call++) {
      const auto found = compiled(x);
      for (size_t i = 0; i < wanted.size(); i++)
        EXPECT_TRUE(at::equal(DTensor(found[i]).full_tensor(), DTensor(wanted[i]).full_tensor())) << call << " " << i;
    }
    EXPECT_TRUE(at::allclose(DTensor(wanted[0]).full_tensor(), torch::tensor(2.0)));
  });
}

// Two all-reduces become one coalesced op. The second input is not contiguous, its result is.
TEST(InFlightCollectives, APartialTensorTimesItsTranspose) {
  const auto values = torch::arange(2, torch::kFloat).add(1).view({1, 2});
  testing::run_ranks(2, [&](testing::Rank&) {
    const auto mesh = init_device_mesh("cpu", {2}, {"x"});
    const at::Tensor x = DTensor::from_local(values, mesh, {Partial()});
    const auto product = [](const at::Tensor& x) { return at::mm(x + x, (x + x).t()); };
    auto compiled = compile(product, {.codegen = false, .captures = Captures::None});
    for (int call = 0; call < 2; call++)
      EXPECT_TRUE(at::equal(DTensor(compiled(x)).full_tensor(), values.mm(values.t()) * 16));
  });
}

// A pass gives the results of a collective another layout than the op returns, so they are copied: after the
// collective, also if the other rank comes late.
TEST(InFlightCollectives, AResultOfAnotherLayoutIsCopiedAfterItsCollective) {
  const auto transpose = [](compiler::Program& program) {
    compiler::Matched matched;
    for (const auto& node : program.nodes) {
      if (node.name() != "tessera.all_reduce_coalesced") continue;
      matched.times++;
      node.each_result([&](compiler::ValueId id) {
        for (auto& value : program.values)
          if (value.buffer == program.buffer_of(id)) value.type.strides = {1, value.type.sizes[0]};
      });
    }
    return matched;
  };
  testing::run_ranks(2, [&](testing::Rank& me) {
    const auto group = me.group();
    auto step = compile(
        [group](const at::Tensor& x) {
          const auto sums = funcol::all_reduce_coalesced({x * 2, x * 3}, ReduceOp::Sum, group);
          for (const auto& sum : sums) funcol::wait(sum, group);
          return std::tuple(sums[0] + 1, sums[1] + 1);
        },
        {.passes = PassList{compiler::Pass{"transpose", transpose}},
         .codegen = false,
         .strict_passes = true,
         .captures = Captures::None});
    for (int call = 0; call < 3; call++) {
      if (me.rank == 1)
        for (int i = 0; i < 20; i++) at::mm(torch::ones({400, 400}), torch::ones({400, 400}));
      const auto [a, b] = step(torch::ones({64, 32}));
      EXPECT_TRUE(at::equal(a, torch::full({64, 32}, 5.0))) << call;
      EXPECT_TRUE(at::equal(b, torch::full({64, 32}, 7.0))) << call;
    }
  });
}

}  // namespace
}  // namespace tessera
