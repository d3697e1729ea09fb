#include "tessera/tracing/op_mode.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <ATen/ThreadLocalState.h>
#include <c10/core/AutogradState.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <thread>
#include <vector>

namespace tessera {
namespace {

using Log = std::vector<std::string>;

struct LoggingMode final : OpMode {
  LoggingMode(Log& log, std::string name) : log(log), name(std::move(name)) {}
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override {
    log.push_back(name + " " + op.operator_name().name);
    if (op.operator_name().name == replaced_op) {
      torch::jit::drop(*stack, op.schema().arguments().size());
      stack->emplace_back(result);
    } else {
      next(op, keys, stack);
    }
  }
  Log& log;
  std::string name, replaced_op;
  at::Tensor result;
};

TEST(OpMode, InnermostModeRunsFirst) {
  Log log;
  LoggingMode outer(log, "outer"), inner(log, "inner");
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

// Autograd's threads and at::launch inherit the thread-local state.
TEST(OpMode, OpsOnAThreadThatInheritsTheStateThrow) {
  Log log;
  LoggingMode mode(log, "mode");
  const auto x = torch::ones({2});
  const OpModeScope on(mode);
  const at::ThreadLocalState state;
  std::thread([&] {
    const at::ThreadLocalStateGuard inherited(state);
    EXPECT_ERROR(UsageError, x.exp(), "aten::exp runs on a thread that was started by a thread with an active op mode");
  }).join();
  EXPECT_TRUE(log.empty());
}

TEST(OpMode, BackwardRunsOnTheSameThread) {
  Log log;
  LoggingMode mode(log, "mode");
  const auto threads = [] { return c10::AutogradState::get_tls_state().get_multithreading_enabled(); };
  ASSERT_TRUE(threads());
  {
    const OpModeScope on(mode);
    EXPECT_FALSE(threads());
  }
  EXPECT_TRUE(threads());
}

// Modes are below autograd: the result of a mode has the gradient of the replaced op. Outer modes do not see the op.
TEST(OpMode, ReplacesAnOp) {
  Log log;
  LoggingMode outer(log, "outer"), inner(log, "inner");
  inner.replaced_op = "aten::exp";
  inner.result = torch::full({2}, 7.0);
  auto x = torch::ones({2}, torch::requires_grad());
  at::Tensor y;
  {
    const OpModeScope outer_on(outer), inner_on(inner);
    y = x.exp();
  }
  EXPECT_EQ(log, Log({"inner aten::exp"}));
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(torch::full({2}, 7.0)));  // the backward formula of exp, with the result of the mode
}

}  // namespace
}  // namespace tessera
