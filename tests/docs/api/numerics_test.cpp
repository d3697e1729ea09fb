// The examples of the API reference: numerics, and schedules that are measured and compiled.
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <tessera/tessera.h>
#include <tessera/train.h>
#include <torch/torch.h>

#include <iostream>

namespace tessera::docs_numerics {
namespace {

namespace ts = tessera;
using ts::testing::Rank;
using ts::testing::run_ranks;

TEST(ApiNumerics, Scope) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=1");
    torch::manual_seed(7);
    ts::nn::Linear model(4, 4);
    auto& weight = model->weight;
    ts::distribute_in_place(model->bias, mesh, {ts::Replicate(), ts::Replicate()});
    const auto batch = torch::ones({24, 4});
    const auto loss_of = [](const at::Tensor& y) { return (y * y).sum(); };
    // example: tessera/numerics/numerics.h
    ts::distribute_in_place(weight, mesh, {ts::Replicate(), ts::Shard(0)});  // dp x tp
    // end
    ts::optim::SGD optimizer(model->parameters(), {.lr = 0.1});
    // example: tessera/numerics/numerics.h
    auto x = ts::distribute_tensor(batch, mesh, {ts::Shard(0), ts::Replicate()});
    const ts::NumericsScope scope(ts::Numerics::Invariant);
    auto loss = loss_of(model(x));
    loss.backward();
    optimizer.step();
    for (const ts::InvariantOp& op : ts::invariant_ops())
      if (op.op == "aten::mm") std::cout << op.op << ": " << op.how << "\n";  // the order of its sums
    // end
    EXPECT_FALSE(ts::invariant_ops().empty());
  });
}

TEST(ApiNumerics, VirtualShards) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("dp=2");
    torch::manual_seed(7);
    ts::nn::Linear model(4, 4);
    const auto x = torch::ones({24, 4}), y = torch::zeros({24, 4});  // the rows of this rank
    const double rows_of_global_batch = 48;
    const auto loss_sum = [](const at::Tensor& a, const at::Tensor& b) { return ((a - b) * (a - b)).sum(); };
    // example: tessera/data_parallel/virtual_shards.h
    ts::fully_shard(model, {.mesh = mesh["dp"]});  // or replicate, or DistributedDataParallel
    ts::VirtualShards shards(*model, mesh["dp"]);
    // end
    ts::optim::SGD optimizer(model->parameters(), {.lr = 0.1});
    // example: tessera/data_parallel/virtual_shards.h
    const ts::NumericsScope scope(ts::Numerics::Invariant);
    for (int64_t i = 0; i < shards.local_count(); i++) {
      auto loss = loss_sum(model(shards.rows(x, i)), shards.rows(y, i)) / rows_of_global_batch;
      loss.backward();
      shards.add_gradients();
    }
    shards.reduce_gradients();  // .grad is the sum over all ranks
    optimizer.step();
    // end
    EXPECT_EQ(shards.count(), 24);
  });
}

TEST(ApiNumerics, CompiledStages) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("pp=2");
    torch::manual_seed(7);
    const auto x = torch::ones({4, 4}), y = torch::zeros({4, 4});
    using namespace ts::pipelining;
    ts::nn::Sequential model(ts::nn::Linear(4, 4), ts::nn::Linear(4, 4));
    auto stages = build_stages(*model, split_evenly(layers_of(model), 2), "1F1B", mesh["pp"]);
    // example: tessera/pipelining/schedule.h
    for (PipelineStage& stage : stages) compile_stage(stage);
    // end
    const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
      return (output - target).pow(2).mean();
    };
    // example: tessera/pipelining/schedule.h
    ts::pipelining::Schedule1F1B schedule(stages, /*n_microbatches=*/4, loss, mesh["pp"]);
    schedule.step(x, y);
    ts::pipelining::ScheduleProfile profile = schedule.profile(x, y);  // measures the stages, simulates the schedule
    // end
    EXPECT_GT(profile.simulation.seconds, 0);
  });
}

}  // namespace
}  // namespace tessera::docs_numerics
