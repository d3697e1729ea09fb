#include "tessera/nn/saved_tensor_hooks.h"

#include "tessera/nn/save_on_cpu.h"
#include "tessera/testing/detail/counting_allocator.h"
#include "tessera/testing/expect_error.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace tessera {
namespace {

using testing::error_message;

// A packer that logs its calls and accepts tensors of one size, or all.
Packer logging(std::vector<std::string>& log, const std::string& name, int64_t numel = -1) {
  return {numel < 0 ? Accepts::AllTensors : Accepts::SomeTensors, [&log, name, numel](const at::Tensor& t) -> Unpack {
            if (numel >= 0 && t.numel() != numel) {
              log.push_back(name + " declines");
              return {};
            }
            log.push_back(name + " packs");
            return [&log, name, saved = t.detach().clone()] {
              log.push_back(name + " unpacks");
              return saved;
            };
          }};
}

using Log = std::vector<std::string>;

TEST(SavedTensorHooks, CallsPackInForwardAndUnpackInBackward) {
  Log log;
  auto x = torch::rand({3}, torch::requires_grad());
  at::Tensor y;
  {
    SavedTensorHooks scope(logging(log, "a"));
    y = x.exp();
  }
  EXPECT_EQ(log, Log({"a packs"}));
  y.sum().backward();
  EXPECT_EQ(log, Log({"a packs", "a unpacks"}));
  EXPECT_TRUE(x.grad().equal(x.exp().detach()));
  EXPECT_TRUE(detail::packers().empty());
}

TEST(SavedTensorHooks, PackersAreNotCalledOutsideOfTheScope) {
  Log log;
  { SavedTensorHooks scope(logging(log, "a")); }
  torch::rand({3}, torch::requires_grad()).exp();
  EXPECT_EQ(log, Log{});
}

TEST(SavedTensorHooks, OnlyTheInnermostPackerForAllTensorsIsCalled) {
  Log log;
  auto x = torch::rand({3}, torch::requires_grad());
  SavedTensorHooks outer(logging(log, "outer"));
  {
    SavedTensorHooks inner(logging(log, "inner"));
    x.exp();
  }
  x.exp();
  EXPECT_EQ(log, Log({"inner packs", "outer packs"}));
}

// A packer for some tensors comes before one for all tensors, in any nesting.
TEST(SavedTensorHooks, PackersForSomeTensorsAreCalledFirst) {
  for (const bool filter_inside : {false, true}) {
    Log log;
    auto all = logging(log, "all"), packs3 = logging(log, "packs3", 3), packs5 = logging(log, "packs5", 5);
    auto three = torch::rand({3}, torch::requires_grad()), four = torch::rand({4}, torch::requires_grad());
    at::Tensor y3, y4;
    {
      SavedTensorHooks first(packs5), second(filter_inside ? all : packs3), third(filter_inside ? packs3 : all);
      y3 = three.exp();
      y4 = four.exp();
    }
    EXPECT_EQ(log, Log({"packs3 packs", "packs3 declines", "packs5 declines", "all packs"}));
    (y3.sum() + y4.sum()).backward();
    EXPECT_TRUE(three.grad().equal(y3.detach()) && four.grad().equal(y4.detach()));
  }
}

// A declined tensor is saved as usual: without a copy or a reference cycle, and with detection of in-place writes.
TEST(SavedTensorHooks, ADeclinedTensorIsSavedAsUsual) {
  Log log;
  testing::CountingAllocator count;
  {
    auto x = torch::ones({256}, torch::requires_grad());
    SavedTensorHooks scope(logging(log, "packs3", 3));
    auto y = x.exp();
    EXPECT_EQ(count.live_bytes(), 2 * 256 * 4);  // x and y
    y.sum().backward();
    EXPECT_TRUE(x.grad().equal(y.detach()));

    auto z = x.exp();
    z.add_(1);
    const auto said = error_message([&] { z.sum().backward(); });
    EXPECT_CONTAINS(said, "modified in place");
    EXPECT_CONTAINS(said, "version 1");
    EXPECT_CONTAINS(said, "clone()");
  }
  EXPECT_EQ(count.live_bytes(), 0);  // no reference cycle
}

TEST(SavedTensorHooks, DoubleBackwardCallsPackers) {
  Log log;
  auto x = torch::rand({3}, torch::dtype(torch::kDouble).requires_grad(true));
  SavedTensorHooks scope(logging(log, "a"));
  auto grad = torch::autograd::grad({(x * x * x).sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  auto second = torch::autograd::grad({grad.sum()}, {x})[0];
  EXPECT_TRUE(torch::allclose(second, 6 * x.detach()));
  EXPECT_FALSE(log.empty());
}

TEST(SavedTensorHooks, ScopesEndOnException) {
  Log log;
  auto x = torch::rand({3}, torch::requires_grad());
  const auto fails = [&] {
    SavedTensorHooks outer(logging(log, "outer"));
    SavedTensorHooks scope(
        {Accepts::AllTensors, [](const at::Tensor&) -> Unpack { throw std::runtime_error("cannot pack"); }});
    x.exp();
  };
  EXPECT_THROW(fails(), std::runtime_error);
  EXPECT_TRUE(detail::packers().empty());
  const auto unpack_fails = [&] {
    at::Tensor y;
    {
      SavedTensorHooks scope({Accepts::AllTensors, [](const at::Tensor&) -> Unpack {
                                return []() -> at::Tensor { throw std::runtime_error("cannot unpack"); };
                              }});
      y = x.exp();
    }
    y.sum().backward();
  };
  EXPECT_THROW(unpack_fails(), std::runtime_error);
}

TEST(SavedTensorHooks, APackerForAllTensorsMustNotDecline) {
  auto x = torch::rand({3}, torch::requires_grad());
  SavedTensorHooks scope({Accepts::AllTensors, [](const at::Tensor&) { return Unpack(); }});
  const auto said = error_message([&] { x.exp(); });
  EXPECT_CONTAINS(said, "Accepts::AllTensors declined");
  EXPECT_CONTAINS(said, "Accepts::SomeTensors");
}

TEST(SaveOnCpu, DoesNotCopyCpuTensors) {
  testing::CountingAllocator count;
  auto x = torch::ones({256}, torch::requires_grad());
  at::Tensor y;
  {
    SaveOnCpu offload;
    y = x.exp();
  }
  EXPECT_EQ(count.allocations(), 2);  // x and y, no copies
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(y.detach()));
  auto z = [&] {
    SaveOnCpu offload;
    return x.exp();
  }();
  z.mul_(2);
  EXPECT_CONTAINS(error_message([&] { z.sum().backward(); }), "modified in place");
}

TEST(SaveOnCpu, PinMemoryWithoutCudaThrows) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "this machine has CUDA";
  const auto said = error_message([&] { SaveOnCpu({.pin_memory = true}); });
  EXPECT_CONTAINS(said, "pin_memory");
  EXPECT_CONTAINS(said, "no CUDA device");
  EXPECT_TRUE(detail::packers().empty());
}

TEST(SaveOnCpu, ReturnsTensorsToCuda) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  for (const bool pin : {false, true}) {
    auto x = torch::rand({64, 32}, torch::device(torch::kCUDA).requires_grad(true));
    auto w = torch::rand({64, 32}, torch::kCUDA).t();  // the strides must be restored too
    at::Tensor y;
    {
      SaveOnCpu offload({.pin_memory = pin});
      y = torch::mm(x, w).exp();
    }
    y.sum().backward();
    auto grad = x.grad().clone();
    x.mutable_grad().reset();
    torch::mm(x, w).exp().sum().backward();
    EXPECT_TRUE(grad.equal(x.grad()));
  }
}

}  // namespace
}  // namespace tessera
