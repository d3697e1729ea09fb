// What tests/parity/optim_test.cpp does not cover: factors, tensor learning rates, state, errors.
#include "tessera/optim/schedulers.h"

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/detail/host_reads.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::optim {
namespace {

using testing::error_message;

SGD make_optimizer(const LearningRate& lr = 1) { return SGD(Tensors{torch::zeros(1)}, {.lr = lr}); }

std::vector<double> values(LRScheduler& scheduler, int steps) {
  std::vector<double> rates;
  for (int i = 0; i < steps; i++) {
    rates.push_back(scheduler.optimizer().lr(0));
    scheduler.step();
  }
  return rates;
}

TEST(Schedulers, WarmupFactorsHaveExpectedValues) {
  const auto wsd = warmup_stable_decay(2, 3, 4, 0.5);
  std::vector<double> factors;
  for (int64_t i = 0; i < 11; i++) factors.push_back(wsd(i));
  EXPECT_EQ(factors, (std::vector<double>{0, 0.5, 1, 1, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.5}));

  const auto cosine = cosine_with_warmup(4, 12, 0.1);
  EXPECT_EQ(cosine(1), 0.25);
  EXPECT_EQ(cosine(4), 1);
  EXPECT_NEAR(cosine(8), 0.55, 1e-12);
  EXPECT_NEAR(cosine(12), 0.1, 1e-12);
  EXPECT_NEAR(cosine(100), 0.1, 1e-12);
}

TEST(Schedulers, TensorLearningRateIsWrittenInPlace) {
  const auto lr = torch::tensor(1.0, torch::kDouble);
  auto optimizer = make_optimizer(lr);
  ExponentialLR schedule(optimizer, 0.5);
  schedule.step();
  EXPECT_EQ(lr.item<double>(), 0.5);
  EXPECT_EQ(schedule.last_lr(), std::vector<double>{0.5});
}

TEST(Schedulers, TensorLearningRateIsReadOnlyAfterOtherWrites) {
  const auto lr = torch::tensor(0.1f);
  auto optimizer = make_optimizer(lr);
  CosineAnnealingLR cosine(optimizer, 10);
  ExponentialLR chained(optimizer, 0.9);
  testing::HostReadCounter mode;
  {
    const OpModeScope on(mode);
    for (int step = 0; step < 3; step++) cosine.step(), chained.step();
    optimizer.step();
    EXPECT_EQ(mode.reads, 0);
    EXPECT_GE(mode.ops, 6);  // writes are ops too
  }
  EXPECT_EQ(optimizer.lr(0), lr.item<double>());  // rounded to the tensor's dtype
  lr.fill_(2);
  EXPECT_EQ(optimizer.lr(0), 2);
  const auto half = torch::tensor(0.1f).to(torch::kBFloat16);
  auto other = make_optimizer(half);
  other.set_lr(0, 0.3);
  EXPECT_EQ(other.lr(0), half.item<double>());
}

TEST(Schedulers, ResumeFromSavedState) {
  const auto make = [](Optimizer& o) {
    return std::make_unique<SequentialLR>(
        o,
        std::vector<std::shared_ptr<LRScheduler>>{std::make_shared<LinearLR>(o, 0.5, 1.0, 3),
                                                  std::make_shared<CosineAnnealingLR>(o, 6)},
        std::vector<int64_t>{4});
  };
  auto optimizer = make_optimizer(), other = make_optimizer();
  const auto schedule = make(optimizer), loaded = make(other);
  values(*schedule, 6);
  loaded->load_state_dict(schedule->state_dict());
  other.set_options(0, optimizer.options(0));
  EXPECT_EQ(loaded->last_epoch(), 6);
  EXPECT_EQ(values(*loaded, 5), values(*schedule, 5));

  auto broken = schedule->state_dict();
  broken.erase("schedulers.1.last_lr");
  auto third = make_optimizer();
  const auto fresh = make(third);
  EXPECT_ERROR(UsageError, fresh->load_state_dict(broken), "last_lr");
  EXPECT_EQ(fresh->state_dict().at("schedulers.0.last_epoch").item<int64_t>(), 0);
  EXPECT_EQ(values(*fresh, 1), std::vector<double>{0.5});
}

TEST(Schedulers, Errors) {
  auto optimizer = make_optimizer(), other = make_optimizer();
  EXPECT_ERROR(UsageError, StepLR(optimizer, 0), "StepLR: step_size must be greater than 0; found 0");
  EXPECT_ERROR(UsageError, LinearLR(optimizer, 0), "start_factor must be greater than 0");
  EXPECT_ERROR(UsageError, LambdaLR(optimizer, std::vector<LambdaLR::Factor>{}), "0 functions", "1 parameter groups");
  EXPECT_ERROR(UsageError, cosine_with_warmup(5, 5), "5 warm-up steps of 5");
  const auto mine = std::make_shared<ExponentialLR>(optimizer, 0.5),
             theirs = std::make_shared<ExponentialLR>(other, 0.5);
  using Schedulers = std::vector<std::shared_ptr<LRScheduler>>;
  EXPECT_ERROR(UsageError, SequentialLR(optimizer, Schedulers{mine, theirs}, {3}),
               "scheduler 1 belongs to another optimizer");
  EXPECT_ERROR(UsageError, SequentialLR(optimizer, Schedulers{mine}, {3}), "1 schedulers and 1 milestones");
  EXPECT_EQ(optimizer.lr(0), 1);
  optimizer.add_param_group({{torch::zeros(1)}});
  EXPECT_ERROR(UsageError, mine->step(), "created for 1 parameter groups", "now has 2");
}

}  // namespace
}  // namespace tessera::optim
