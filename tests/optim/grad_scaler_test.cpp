// The scale, skipped steps, and that all ranks skip together.
#include "tessera/optim/grad_scaler.h"

#include "tessera/base/error.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/detail/host_reads.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

namespace tessera::optim {
namespace {

using testing::error_message;
using testing::Rank;
using testing::run_ranks;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(GradScaler, ScaledStepEqualsUnscaledStep) {
  for (const bool fused : {false, true})
    for (const bool unscale : {false, true}) {
      auto p = torch::ones(4, torch::requires_grad()), q = torch::ones(4, torch::requires_grad());
      AdamW optimizer({p}, {.lr = 0.1, .fused = fused}), reference({q}, {.lr = 0.1, .fused = fused});
      GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
      for (int step = 0; step < 3; step++) {
        optimizer.zero_grad();
        reference.zero_grad();
        const auto x = torch::arange(4, torch::kFloat) - 1.5 + step;
        scaler.scale((p * x).sum()).backward();
        (q * x).sum().backward();
        if (unscale) {
          scaler.unscale_(optimizer);
          EXPECT_TRUE(torch::equal(p.grad(), q.grad()));
        }
        scaler.step(optimizer);
        scaler.update();
        reference.step();
        EXPECT_TRUE(fused ? torch::equal(p, q) : torch::allclose(p, q, 1e-6))
            << fused << unscale;  // not fused: rounds differently
      }
      EXPECT_EQ(scaler.get_scale(), 2048);  // grew after two steps
    }
}

// One rank has an inf in its local gradient. All ranks skip the step and shrink the scale.
TEST(GradScaler, AllRanksSkipAStepWithInf) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    for (const bool fused : {false, true}) {
      at::Tensor p = distribute_tensor(torch::ones(4), mesh, {Shard(0)}).detach().requires_grad_();
      SGD optimizer({p}, {.lr = 1, .momentum = 0.5, .fused = fused});
      GradScaler scaler({.init_scale = 4});
      const auto step = [&](float last) {
        p.mutable_grad() = distribute_tensor(torch::tensor({4.f, 4.f, 4.f, last}), mesh, {Shard(0)});
        testing::HostReadCounter mode;
        {
          const OpModeScope on(mode);
          scaler.step(optimizer);
        }
        EXPECT_EQ(mode.reads, 0);
        EXPECT_EQ(scaler.found_inf(optimizer).item<float>(), last == kInfinity ? 1 : 0);
        {
          const OpModeScope on(mode);
          scaler.update();
        }
        EXPECT_EQ(mode.reads, 0);
      };
      step(kInfinity);
      EXPECT_TRUE(torch::equal(DTensor(p).full_tensor(), torch::ones(4))) << fused;
      EXPECT_EQ(scaler.get_scale(), 2);
      step(4);  // gradients are 2; the skipped step left no momentum
      EXPECT_TRUE(torch::equal(DTensor(p).full_tensor(), torch::full(4, -1.))) << fused;
      EXPECT_EQ(scaler.get_scale(), 2);
    }
  });
}

TEST(GradScaler, SkippedStepsAreNotCounted) {
  auto p = torch::ones(2, torch::requires_grad());
  AdamW optimizer({p}, {.fused = true});
  GradScaler scaler;
  for (const float g : {1.f, kInfinity, 1.f}) {
    p.mutable_grad() = torch::full(2, g);
    scaler.step(optimizer);
    scaler.update();
  }
  EXPECT_EQ(optimizer.state(p).at("step").item<float>(), 2);
}

TEST(GradScaler, StateAndErrors) {
  auto p = torch::ones(2, torch::requires_grad());
  SGD optimizer({p});
  GradScaler scaler({.init_scale = 8}), other;
  EXPECT_ERROR(UsageError, scaler.step(optimizer), "no parameter of this SGD has a gradient");
  EXPECT_ERROR(UsageError, scaler.update(), "no optimizer has stepped");
  p.mutable_grad() = torch::ones(2);
  scaler.unscale_(optimizer);
  EXPECT_ERROR(UsageError, scaler.unscale_(optimizer), "already unscaled");
  scaler.step(optimizer);
  EXPECT_ERROR(UsageError, scaler.step(optimizer), "already stepped");
  scaler.update();
  other.load_state_dict(scaler.state_dict());
  EXPECT_EQ(other.get_scale(), 8);
  auto half = torch::ones(2, torch::kHalf).requires_grad_();
  half.mutable_grad() = torch::ones(2, torch::kHalf);
  SGD half_optimizer({half});
  EXPECT_ERROR(UsageError, scaler.step(half_optimizer), "fp16");
  EXPECT_ERROR(UsageError, GradScaler({.growth_factor = 0.5}), "growth_factor greater than 1");
  GradScaler off({.enabled = false});
  EXPECT_TRUE(off.scale(p).is_same(p));
}

}  // namespace
}  // namespace tessera::optim
