// Stages whose forward, gradient of the input (I) and gradients of the weights (W) are compiled programs.
#include "tessera/base/error.h"
#include "tessera/compile/api/options.h"
#include "tessera/compile/detail/report/compile_trace.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/models/sizes.h"
#include "tessera/pipelining/detail/schedules.h"
#include "tessera/pipelining/schedule.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::pipelining {
namespace {

using tessera::testing::Rank;
using tessera::testing::run_ranks;

const models::GPT2Config kTinyGpt{.vocab_size = 24, .max_seq_len = 8, .n_layer = 4, .n_head = 2, .n_embd = 8};

// Gradients and losses of three steps, with stages that run eagerly or compiled.
std::vector<at::Tensor> results_of_steps(const models::GPT2& initial, const std::string& schedule_name,
                                         const DeviceMesh& mesh, const std::optional<CompileOptions>& options) {
  models::GPT2 model = clone(initial);
  const bool tp = mesh.ndim() > 1;
  if (tp)
    parallelize_module(model, mesh["tp"], models::tensor_parallel_plan(kTinyGpt), {.src_data_rank = std::nullopt});
  const comm::Group pp = mesh.get_group("pp");
  const int64_t per_rank = schedule_name == "1F1B" || schedule_name == "GPipe" ? 1 : 2;
  auto stages =
      build_stages(*model, split_evenly(models::pipeline_layers(model), pp->size() * per_rank), schedule_name, pp);
  for (PipelineStage& stage : stages) {
    if (tp) stage.mesh = mesh["tp"];
    if (options) compile_stage(stage, *options);
  }
  PipelineSchedule schedule(
      schedule_name, stages, 4,
      [](const at::Tensor& logits, const at::Tensor& target) { return models::loss(logits, target); }, pp);
  std::vector<at::Tensor> results;
  for (int64_t step = 0; step < 3; ++step) {
    const at::Tensor tokens = torch::arange(9 * 9).mul(7).add(step).remainder(24).view({9, 9});  // 9 rows: uneven
    model->zero_grad();
    for (const at::Tensor& loss :
         schedule.step(tokens.narrow(1, 0, 8).contiguous(), tokens.narrow(1, 1, 8).contiguous()))
      results.push_back(loss);
    for (const PipelineStage& stage : stages)
      for (const at::Tensor& parameter : stage.parameters())
        results.push_back(is_dtensor(parameter.grad()) ? DTensor(parameter.grad()).to_local().clone()
                                                       : parameter.grad().clone());
  }
  return results;
}

TEST(CompileStage, EverySchedulesGradientsAreThoseOfEagerStages) {
  torch::manual_seed(3);
  const models::GPT2 initial(kTinyGpt);
  struct StageCase {
    std::string schedule, mesh;
  };
  std::vector<StageCase> cases = {{"ZBVZeroBubble", "pp=2,tp=2"}};
  for (const std::string& name : schedule_names()) cases.push_back({name, "pp=2"});
  for (const StageCase& each : cases) {
    SCOPED_TRACE(each.schedule + " " + each.mesh);
    run_ranks(each.mesh == "pp=2" ? 2 : 4, [&](Rank& me) {
      const DeviceMesh mesh = me.mesh(each.mesh);
      const auto eager = results_of_steps(initial, each.schedule, mesh, std::nullopt);
      const auto compiled = results_of_steps(initial, each.schedule, mesh, CompileOptions{.codegen = false});
      ASSERT_EQ(compiled.size(), eager.size());
      for (size_t i = 0; i < eager.size(); ++i) EXPECT_TRUE(compiled[i].equal(eager[i])) << i << " on rank " << me.rank;
    });
  }
}

// Products of a stage of two linear layers: I has one per layer, and W has one per layer.
TEST(CompileStage, InputAndWeightGradientsAreTwoPrograms) {
  run_ranks(1, [](Rank& me) {
    nn::Sequential block(nn::Linear(4, 4), nn::Linear(4, 4));
    std::map<std::string, int64_t> products;
    PipelineStage first([](const at::Tensor& x) { return x * 1; }, {}, 0, 2);
    PipelineStage last(block, 1, 2);
    compile_stage(last, {.codegen = false, .trace = [&](const compiler::CompileTrace& trace) {
                           for (const auto& node : trace.stages.back().program.nodes)
                             products[trace.what] += node.name() == "aten.mm" || node.name() == "aten.addmm";
                         }});
    ScheduleInterleavedZeroBubble schedule(
        {first, last}, 4, [](const at::Tensor& y, const at::Tensor& t) { return (y - t).square().mean(); }, me.group());
    const at::Tensor x = torch::randn({8, 4});
    schedule.step(x, x);
    EXPECT_EQ(products, (std::map<std::string, int64_t>{{"forward", 2}, {"backward", 2}, {"backward_weights", 2}}));
  });
}

TEST(CompileStage, StagesOfFullyShardAreRefused) {
  run_ranks(2, [](Rank& me) {
    PipelineStage stage(nn::Linear(4, 4), 0, 2);
    fully_shard(stage.module(), {.mesh = me.mesh({2}, {"fsdp"})});
    EXPECT_ERROR(UsageError, compile_stage(stage), "fully_shard()", "stage 0", "average_gradients()");
  });
}

}  // namespace
}  // namespace tessera::pipelining
