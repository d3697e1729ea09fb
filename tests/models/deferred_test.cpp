// The models in deferred_init: sharded by their tensor-parallel plans, then materialized.
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/sizes.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/detail/counting_allocator.h"
#include "tessera/testing/ranks.h"
#include "tests/models/small_models.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::models {
namespace {

using test::kGpt;
using test::kLlama;
using testing::CountingAllocator;
using testing::Rank;
using testing::run_ranks;

template <class Model, class Config>
Model deferred(const Config& config) {
  manual_seed(11);
  return deferred_init([&] { return Model(config); });
}

template <class Model, class Config>
void expect_same_weights(const Config& config) {
  auto alone = deferred<Model>(config);
  materialize(alone);
  const auto tokens = torch::arange(12).view({2, 6});
  const auto expected = alone(tokens).detach();
  for (int n : {1, 2, 3})
    run_ranks(n, [&](Rank& me) {
      auto model = deferred<Model>(config);
      CommDebugMode comms;
      parallelize_module(model, me.mesh({n}, {"tp"}), tensor_parallel_plan(config));
      materialize(model);
      EXPECT_EQ(comms.get_total_counts(), 0);
      comms.exit();
      const auto got = model->named_parameters(), expected_weights = alone->named_parameters();
      ASSERT_EQ(got.size(), expected_weights.size());
      for (const auto& item : got) {
        auto t = item.value().detach();
        if (is_dtensor(t)) t = DTensor(t).full_tensor();
        EXPECT_TRUE(torch::equal(t, expected_weights[item.key()])) << item.key();
      }
      torch::NoGradGuard no_grad;
      auto logits = model(tokens);
      if (is_dtensor(logits)) logits = DTensor(logits).full_tensor();
      EXPECT_TRUE(torch::allclose(logits, expected, 1e-4, 1e-5));
    });
}

TEST(DeferredModels, WeightsDoNotDependOnTheMesh) {
  expect_same_weights<GPT2>(kGpt);
  expect_same_weights<Llama>(kLlama);
}

TEST(DeferredModels, ALlamaOfOneBillionParametersNeedsNoMemory) {
  init({.backend = "fake", .rank = 9, .world_size = 64});
  {
    const auto mesh = init_device_mesh("cpu", {64}, {"dp"});
    const auto& config = std::get<LlamaConfig>(find_config("llama-1b"));
    CountingAllocator count;
    auto model = deferred<Llama>(config);
    int64_t parameters = 0;
    for (auto& p : model->parameters()) {
      distribute_in_place(p, mesh, {Shard(0)});
      EXPECT_TRUE(is_deferred(p));
      parameters += p.numel();
    }
    EXPECT_EQ(parameters, parameter_count(config));
    EXPECT_GT(parameters, 1'000'000'000);
    EXPECT_LT(count.largest(), int64_t{1} << 20);
  }
  destroy();
}

}  // namespace
}  // namespace tessera::models
