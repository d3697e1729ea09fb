#include "tessera/base/op_mode.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera {
namespace {

using Log = std::vector<std::string>;

struct Noting final : OpMode {
  Noting(Log& log, std::string name) : log(log), name(std::move(name)) {}
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override {
    log.push_back(name + " " + op.operator_name().name);
    if (op.operator_name().name == stands_in_for) {
      torch::jit::drop(*stack, op.schema().arguments().size());
      stack->emplace_back(result);
    } else {
      next(op, keys, stack);
    }
  }
  Log& log;
  std::string name, stands_in_for;
  at::Tensor result;
};

TEST(OpMode, InnermostIsAskedFirst) {
  Log log;
  Noting outer(log, "outer"), inner(log, "inner");
  const auto x = torch::ones({2});
  {
    const OpModeScope outer_on(outer);
    {
      const OpModeScope inner_on(inner);
      x.exp();
    }
    x.sin();
    const OpModesOff off;
    x.cos();
  }
  x.tan();
  EXPECT_EQ(log, Log({"inner aten::exp", "outer aten::exp", "outer aten::sin"}));
}

// Below autograd: the result of a mode gets the gradient of the op that it stands in for, and outer modes see nothing.
TEST(OpMode, StandsInForAnOp) {
  Log log;
  Noting outer(log, "outer"), inner(log, "inner");
  inner.stands_in_for = "aten::exp";
  inner.result = torch::full({2}, 7.0);
  auto x = torch::ones({2}, torch::requires_grad());
  at::Tensor y;
  {
    const OpModeScope outer_on(outer), inner_on(inner);
    y = x.exp();
  }
  EXPECT_EQ(log, Log({"inner aten::exp"}));
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(torch::full({2}, 7.0)));  // exp's formula, from what the mode returned
}

}  // namespace
}  // namespace tessera
