#include "tessera/pipelining/detail/pipeline_run.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

namespace tessera::pipelining {
namespace {

using tessera::testing::Rank;
using tessera::testing::run_ranks;

// A model of `stages` residual blocks. All ranks make the same one.
struct Blocks {
  explicit Blocks(int64_t stages) {
    static std::mutex generator;  // ranks are threads and share LibTorch's
    const std::lock_guard lock(generator);
    torch::manual_seed(7);
    for (int64_t i = 0; i < stages; ++i) {
      torch::nn::Sequential block(torch::nn::Linear(6, 12), torch::nn::GELU(), torch::nn::Linear(12, 6),
                                  torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
      block->to(torch::kDouble);
      blocks.push_back(block);
    }
    input = torch::randn({11, 6}, torch::kDouble);  // 11 rows: microbatches differ in size
    target = torch::randn({11, 6}, torch::kDouble);
  }
  StageModule stage(int64_t index) {
    torch::nn::Sequential block = blocks[index];
    return {index, [block](const at::Tensor& x) mutable { return block->forward(x) + x; }, block->parameters()};
  }
  std::vector<torch::nn::Sequential> blocks;
  torch::Tensor input, target;
};

at::Tensor squared_error(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}

void expect_same_as_one_rank(const PipelineShape& shape, const std::string& schedule, const std::string& backend) {
  SCOPED_TRACE(::testing::Message() << schedule << " ranks " << shape.ranks << " microbatches " << shape.microbatches);
  run_ranks(shape.ranks,
            [&](Rank& me) {
              Blocks plain(shape.stages());
              std::vector<at::Tensor> losses;
              const std::vector<at::Tensor> targets = plain.target.tensor_split(shape.microbatches);
              for (const at::Tensor& rows : plain.input.tensor_split(shape.microbatches)) {
                at::Tensor x = rows;
                for (int64_t i = 0; i < shape.stages(); ++i) x = plain.stage(i).forward(x);
                losses.push_back(squared_error(x, targets[losses.size()]));
                (losses.back() / static_cast<double>(shape.microbatches)).backward();
              }

              Blocks model(shape.stages());
              std::vector<StageModule> mine;
              const std::vector<int64_t> rank_of = stage_ranks(schedule, shape);
              for (int64_t i = shape.stages() - 1; i >= 0; --i)
                if (rank_of[i] == me.rank) mine.push_back(model.stage(i));
              PipelineRun pipeline(mine, {schedule, shape.microbatches, squared_error}, me.group());
              for (int step = 1; step <= 2; ++step) {  // gradients accumulate over steps
                const std::vector<at::Tensor> found = pipeline.step(model.input, model.target);
                ASSERT_EQ(found.size(), rank_of.back() == me.rank ? losses.size() : 0);
                for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].allclose(losses[i], 1e-9, 1e-9));
                for (const StageModule& stage : mine) {
                  const std::vector<at::Tensor> expected = plain.stage(stage.stage).parameters;
                  for (size_t i = 0; i < expected.size(); ++i)
                    EXPECT_TRUE(stage.parameters[i].grad().allclose(step * expected[i].grad(), 1e-9, 1e-9))
                        << "stage " << stage.stage << " parameter " << i;
                }
              }
            },
            {.backend = backend});
}

TEST(PipelineRun, EverySchedulesGradientsAreThoseOfOneRank) {
  for (const std::string& schedule : schedule_names()) {
    const int64_t local = schedule == "GPipe" || schedule == "1F1B" ? 1 : 2;
    for (const int64_t ranks : {1, 2, 4})
      for (const int64_t microbatches : {4, 8}) {
        if (schedule == "DualPipeV" && microbatches < 2 * ranks) continue;
        expect_same_as_one_rank({ranks, local, microbatches}, schedule, "threads");
      }
  }
}

TEST(PipelineRun, RunsOverSharedMemoryAndGloo) {
  for (const char* backend : {"shm", "gloo"}) expect_same_as_one_rank({2, 2, 4}, "ZBVZeroBubble", backend);
}

TEST(PipelineRun, FailingStageIsNamed) {
  run_ranks(1, [](Rank& me) {
    Blocks model(1);
    StageModule stage = model.stage(0);
    stage.forward = [forward = stage.forward, calls = 0](const at::Tensor& x) mutable {
      TESSERA_CHECK(++calls < 3, UsageError, "planted");
      return forward(x);
    };
    PipelineRun pipeline({stage}, {"GPipe", 4, squared_error}, me.group());
    EXPECT_ERROR(c10::Error, pipeline.step(model.input, model.target), "planted", "0F2", "GPipe");
  });
}

TEST(PipelineRun, StagesThatTheScheduleDoesNotGiveAreRefused) {
  run_ranks(2, [](Rank& me) {
    Blocks model(4);
    std::vector<StageModule> looped = {model.stage(me.rank), model.stage(me.rank + 2)};
    EXPECT_ERROR(UsageError, PipelineRun(looped, {"ZBVZeroBubble", 4, squared_error}, me.group()), "ZBVZeroBubble");
    PipelineRun pipeline(looped, {"Interleaved1F1B", 4, squared_error}, me.group());
    if (me.rank == 0)
      EXPECT_ERROR(UsageError, pipeline.step(model.input.slice(0, 0, 3), model.target), "3 rows", "4 microbatches");
  });
}

}  // namespace
}  // namespace tessera::pipelining
