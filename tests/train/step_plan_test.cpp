// tessera::plan of a module on 1, 2 and 4 ranks predicts what report() counts on real ranks.
#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/sgd.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tessera/train/plan.h"

#include <torch/torch.h>

#include <sstream>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;

struct PlannedNetImpl : torch::nn::Module {
  PlannedNetImpl() {
    up = register_module("up", nn::Linear(6, 8));
    down = register_module("down", nn::Linear(8, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::tanh(up(x))); }
  nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(PlannedNet);

const auto make_planned = [] { return PlannedNet(); };
Plan planned_tp() { return {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}; }

// A step of a training loop on real ranks.
std::map<std::string, train::Traffic> measured_traffic(Rank& me, const PlannedMesh& axes) {
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  for (const auto& [name, size] : axes) shape.push_back(size), names.push_back(name);
  const auto mesh = me.mesh(shape, names);
  const auto has = [&](const char* axis) { return std::find(names.begin(), names.end(), axis) != names.end(); };
  PlannedNet model;
  if (has("tp")) parallelize_module(model, mesh["tp"], planned_tp());
  if (has("fsdp")) fully_shard(model, {.mesh = mesh["fsdp"]});
  const auto x = torch::ones({3, 6});
  const auto count = [&](auto& called) {
    return report(
               [&] {
                 model->zero_grad();
                 auto loss = called(x).mean();
                 (is_dtensor(loss) ? DTensor(loss).full_tensor() : loss).backward();
               },
               3)
        .traffic;
  };
  if (!has("dp")) return count(model);
  DistributedDataParallel ddp(model, {.device_mesh = mesh["dp"]});
  return count(ddp);
}

TEST(StepPlan, PredictsTheTrafficOfAStep) {
  const PlannedMesh meshes[] = {
      {{"dp", 2}}, {{"fsdp", 4}}, {{"tp", 2}}, {{"dp", 2}, {"tp", 2}}, {{"fsdp", 2}, {"tp", 2}}};
  for (const auto& axes : meshes) {
    const auto planned = plan(make_planned, axes, planned_tp(), torch::ones({3, 6}));
    int64_t ranks = 1;
    for (const auto& [name, size] : axes) ranks *= size;
    run_ranks(ranks, [&](Rank& me) {
      const auto measured = measured_traffic(me, axes);
      if (me.rank != 0) return;
      std::ostringstream text;
      text << planned;
      EXPECT_EQ(measured, planned.traffic_by_axis()) << text.str();
    });
  }
}

TEST(StepPlan, ParametersAndMemory) {
  const auto planned = plan(make_planned, {{"fsdp", 2}, {"tp", 2}}, planned_tp(), torch::ones({3, 6}));
  ASSERT_EQ(planned.parameters.size(), 4u);
  EXPECT_EQ(planned.parameters[0].name, "up.weight");
  EXPECT_EQ(planned.parameters[0].placements, "fsdp SS(0,2), tp S(0)");
  EXPECT_EQ(planned.parameters[0].local_sizes, (std::vector<int64_t>{2, 6}));
  const int64_t bytes = 4 * (2 * 6 + 2 + 3 * 4 + 3);  // rank 0 has 3 of the 5 rows of down
  EXPECT_EQ(planned.memory[0], (train::PlannedMemory{"parameters", bytes}));
  EXPECT_EQ(planned.memory[1].bytes, bytes);
  EXPECT_GT(planned.memory[3].bytes, 0);
  std::ostringstream text;
  text << planned;
  for (const char* part : {"Mesh fsdp=2 tp=2", "down.bias", "allgather_base", "saved for backward", "total"})
    EXPECT_CONTAINS(text.str(), part);
  EXPECT_ERROR(UsageError, plan(make_planned, {{"xy", 2}}, {}, torch::ones({3, 6})), "axis 'xy'", "dp, fsdp and tp");
}

TEST(StepReport, Prints) {
  int64_t calls = 0;
  const auto measured = report([&] { calls++; }, 4);
  EXPECT_EQ(calls, 5);
  std::ostringstream text;
  text << measured;
  EXPECT_CONTAINS(text.str(), "of 4 steps");
  EXPECT_CONTAINS(text.str(), "peak memory");
  EXPECT_ERROR(UsageError, report([] {}, 0), "at least 1");
}

}  // namespace
}  // namespace tessera
