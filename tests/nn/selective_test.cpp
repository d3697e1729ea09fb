#include "tessera/nn/detail/selective.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/testing/detail/counting_allocator.h"
#include "tessera/testing/detail/recorder.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>

namespace tessera {
namespace {

using testing::error_message;
using testing::Rank;
using testing::Recorder;
using testing::run_ranks;

// How often kernels of the op run, on plain and on local tensors, during `body`.
template <class Body>
int64_t calls_of(const std::string& op, Body body) {
  Recorder recorder;
  body();
  recorder.stop();
  const auto ops = recorder.ops();
  return std::count(ops.begin(), ops.end(), op);
}

at::Tensor grad_of(const at::Tensor& p) {
  auto grad = p.grad().clone();
  p.mutable_grad().reset();
  return grad;
}

struct SelectiveNet {
  at::Tensor x = torch::rand({4, 8}, torch::requires_grad()), w1 = torch::rand({8, 8}, torch::requires_grad()),
             w2 = torch::rand({8, 8}, torch::requires_grad());
  at::Tensor operator()(const at::Tensor& x) const { return torch::mm(torch::tanh(torch::mm(x, w1)), w2).sigmoid(); }
};

TEST(Selective, SavedOpsDoNotRunAgain) {
  SelectiveNet net;
  net(net.x).sum().backward();
  const auto gx = grad_of(net.x), gw = grad_of(net.w1);
  struct Case {
    KeepPolicy keep;
    int64_t mms, tanhs;
  };
  int calls = 0;
  const auto every_second = [&](const c10::OperatorHandle& op) {
    return op.operator_name().name == "aten::mm" && calls++ % 2 == 1;
  };
  // Backward itself calls mm four times. Recomputation adds up to two calls.
  for (auto& [keep, mms, tanhs] : std::vector<Case>{{{}, 6, 1},
                                                    {keep_ops({"aten::mm"}), 4, 1},
                                                    {keep_ops({"aten::mm", "aten::tanh"}), 4, 0},
                                                    {every_second, 5, 1}}) {
    const auto calls_in_backward = [&, keep = keep](const std::string& op) {
      calls = 0;
      auto loss = checkpoint({.keep = keep}, net, net.x).sum();
      const auto in_backward = calls_of(op, [&] { loss.backward(); });
      EXPECT_TRUE(grad_of(net.x).equal(gx));
      EXPECT_TRUE(grad_of(net.w1).equal(gw));
      return in_backward;
    };
    EXPECT_EQ(calls_in_backward("aten::mm"), mms);
    EXPECT_EQ(calls_in_backward("aten::tanh"), tanhs);
  }
}

// With retain_graph the saved outputs are used by both backwards.
TEST(Selective, BackwardTwiceUsesSavedOutputsTwice) {
  SelectiveNet net;
  auto plain = net(net.x).sum();
  plain.backward({}, true), plain.backward();
  const auto expected = grad_of(net.x);
  auto loss = checkpoint({.keep = keep_ops({"aten::mm"})}, net, net.x).sum();
  EXPECT_EQ(calls_of("aten::mm", [&] { loss.backward({}, true); }), 4);
  EXPECT_EQ(calls_of("aten::mm", [&] { loss.backward(); }), 4);
  EXPECT_TRUE(grad_of(net.x).equal(expected));
}

// torch::nn::Linear on three dims adds its bias in place to the output of aten::mm, through an alias with its own
// version counter. The saved output must be that of aten::mm without the bias, each time it is used.
TEST(Selective, AnInPlaceWriteDoesNotChangeASavedOutput) {
  torch::nn::Linear linear(8, 8);
  auto x = torch::rand({2, 3, 8}, torch::requires_grad());
  const auto fn = [&](const at::Tensor& x) { return linear(linear(x).tanh()).sigmoid(); };
  auto plain = fn(x).sum();
  plain.backward({}, true), plain.backward();
  const auto expected = grad_of(x);
  auto loss = checkpoint({.keep = keep_ops({"aten::mm"})}, fn, x).sum();
  EXPECT_EQ(calls_of("aten::mm", [&] { loss.backward({}, true); }), 4);
  loss.backward();
  EXPECT_TRUE(grad_of(x).equal(expected));
}

TEST(Selective, AnInPlaceWriteAfterForwardIsDetected) {
  auto x = torch::rand({2, 3, 8}, torch::requires_grad()), w = torch::rand({8, 8}, torch::requires_grad());
  auto y = checkpoint(
      {.keep = keep_ops({"aten::mm"})},
      [&](const at::Tensor& x) {
        auto y = torch::matmul(x, w);
        return std::make_pair(y, y.sin());
      },
      x);
  {
    torch::NoGradGuard no_grad;
    y.first.add_(1);
  }
  EXPECT_CONTAINS(error_message([&] { y.second.sum().backward(); }), "modified in place");
}

// A saved random op does not run again, but the random ops after it must produce the same numbers.
TEST(Selective, RandomOpsAfterASavedRandomOpAreReproduced) {
  auto x = torch::rand({64}, torch::requires_grad());
  const auto fn = [](const at::Tensor& x) {
    auto noise = torch::rand_like(x);
    return torch::dropout((x * noise).tanh(), 0.5, true).sin();
  };
  const auto run = [&](auto&& net) {
    torch::manual_seed(4);
    net(x).sum().backward();
    return grad_of(x);
  };
  const auto plain = run(fn);
  const auto selective = [&](bool preserve) {
    return run([&](const at::Tensor& x) {
      return checkpoint({.preserve_rng_state = preserve, .keep = keep_ops({"aten::rand_like"})}, fn, x);
    });
  };
  EXPECT_TRUE(selective(true).equal(plain));
  EXPECT_FALSE(selective(false).equal(plain));
}

TEST(Selective, OnlySavedOutputsUseMemory) {
  constexpr int64_t n = 128, kBytes = n * n * 4;
  auto x = torch::rand({n, n}, torch::requires_grad());
  testing::CountingAllocator count;
  const auto fn = [](const at::Tensor& x) { return torch::mm(x.tanh().tanh(), x).tanh().tanh(); };
  auto y = checkpoint({.keep = keep_ops({"aten::mm"})}, fn, x);
  EXPECT_EQ(count.live_bytes(), 2 * kBytes);  // y and the output of mm
  y.reset();
  EXPECT_EQ(count.live_bytes(), 0);
}

TEST(Selective, NestedCheckpointsHaveTheSameGradients) {
  SelectiveNet net;
  net(net(net.x)).sum().backward();
  const auto expected = grad_of(net.x);
  const auto inner = [&](const at::Tensor& x) { return checkpoint(net, x); };
  for (const auto& keep : {KeepPolicy(), keep_ops({"aten::mm"})}) {
    checkpoint(
        {.keep = keep_ops({"aten::mm"})},
        [&](const at::Tensor& x) { return checkpoint({.keep = keep}, net, inner(x)); }, net.x)
        .sum()
        .backward();
    EXPECT_TRUE(grad_of(net.x).equal(expected));
  }
}

// Saved outputs are matched by call order, so an extra call is an error even if it has no gradient.
TEST(Selective, AnExtraCallOfASavedOpThrows) {
  SelectiveNet net;
  int runs = 0;
  auto y = checkpoint(
      {.keep = keep_ops({"aten::mm"})},
      [&](const at::Tensor& x) {
        if (runs++ == 1) {
          torch::NoGradGuard no_grad;
          torch::mm(x, net.w1);
        }
        return net(x);
      },
      net.x);
  const auto said = error_message<UsageError>([&] { y.sum().backward(); });
  EXPECT_CONTAINS(said, "recomputation calls aten::mm, whose outputs were saved, at a point where forward did not");
}

TEST(Selective, KeepOpsChecksNames) {
  EXPECT_CONTAINS(error_message<UsageError>([] { keep_ops({"aten::no_such_op"}); }), "unknown op 'aten::no_such_op'");
  EXPECT_CONTAINS(error_message<UsageError>([] { keep_ops({"mm"}); }), "with its namespace");
  EXPECT_CONTAINS(error_message<UsageError>([] { keep_ops({"aten::linear"}); }), "is composite");
  // DTensors have a kernel for it. This is the first test of a process that runs it alone: no kernel is registered yet.
  EXPECT_CONTAINS(error_message<UsageError>([] { keep_ops({"aten::reshape"}); }), "returns or writes its arguments");
  EXPECT_CONTAINS(error_message<UsageError>([] { keep_ops({"aten::add_"}); }), "writes its arguments");
  EXPECT_CONTAINS(error_message<UsageError>([] { keep_ops({"aten::t"}); }), "returns or writes its arguments");
  keep_ops({"aten::sum.dim_IntList", "aten::sum", "aten::_scaled_dot_product_flash_attention_for_cpu"});
}

// A saved op on distributed tensors and its collectives do not run again.
TEST(Selective, SavedOpsOnDistributedTensorsDoNotRunAgain) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    manual_seed(2);
    const at::Tensor x = distribute_tensor(random::rand({4, 8}), mesh, {Shard(0)});
    const at::Tensor w = distribute_tensor(random::rand({8, 8}), mesh, {Shard(0)});  // all-gathered for each mm
    for (const auto& t : {x, w}) t.requires_grad_();
    const auto fn = [&](const at::Tensor& x) { return torch::dropout(torch::mm(x, w).tanh(), 0.5, true).sigmoid(); };
    const auto run = [&](auto&& net) {
      manual_seed(3);
      auto loss = net(x).sum();
      const auto mms = calls_of("aten::mm", [&] { loss.backward(); });
      return std::make_tuple(mms, grad_of(x), grad_of(w));
    };
    const auto [plain_mms, plain_x, plain_w] = run(fn);
    const auto [mms, gx, gw] = run([&](const at::Tensor& x) { return checkpoint(fn, x); });
    const auto [saved_mms, saved_x, saved_w] =
        run([&](const at::Tensor& x) { return checkpoint({.keep = keep_ops({"aten::mm"})}, fn, x); });
    EXPECT_EQ(mms, plain_mms + 1);
    EXPECT_EQ(saved_mms, plain_mms);
    EXPECT_TRUE(gx.equal(plain_x) && gw.equal(plain_w));
    EXPECT_TRUE(saved_x.equal(plain_x) && saved_w.equal(plain_w));
  });
}

// A recorder around forward and backward records the ops that run, and no others.
TEST(Selective, ARecorderSeesOnlyOpsThatRun) {
  SelectiveNet net;
  at::Tensor loss;
  Recorder recorder;
  loss = checkpoint({.keep = keep_ops({"aten::mm"})}, net, net.x).sum();
  loss.backward();
  recorder.stop();
  const auto ops = recorder.ops();
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "aten::mm"), 2 + 4);
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "aten::tanh"), 2);
}

}  // namespace
}  // namespace tessera
