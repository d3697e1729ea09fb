#include "tessera/base/error.h"
#include "tessera/pipelining/schedule.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::pipelining {
namespace {

using tessera::testing::Rank;
using tessera::testing::run_ranks;

nn::Sequential chain(const std::vector<int64_t>& widths) {
  nn::Sequential model;
  for (size_t i = 0; i + 1 < widths.size(); ++i) model->push_back(nn::Linear(widths[i], widths[i + 1]));
  return model;
}

std::string text_of(const std::vector<PipelineLayers>& split) {
  std::string text;
  for (const PipelineLayers& stage : split) {
    text += '[';
    for (const PipelineLayer& layer : stage) text += layer.name;
    text += ']';
  }
  return text;
}

TEST(StageSplit, AtNames) {
  const PipelineLayers layers = layers_of(chain({2, 2, 2, 2, 2}));
  EXPECT_EQ(text_of(split_at(layers, {})), "[0123]");
  EXPECT_EQ(text_of(split_at(layers, {"3", "1"})), "[0][12][3]");
  EXPECT_ERROR(UsageError, split_at(layers, {"4"}), "no layer '4'", "'0'", "'3'");
  EXPECT_ERROR(UsageError, split_at(layers, {"0"}), "first layer");
  EXPECT_ERROR(UsageError, split_at(layers, {"2", "2"}), "twice");
}

TEST(StageSplit, EvenlyByParameters) {
  EXPECT_EQ(text_of(split_evenly(layers_of(chain({2, 2, 2, 2, 2})), 2)), "[01][23]");
  EXPECT_EQ(text_of(split_evenly(layers_of(chain({2, 2, 2, 2, 99})), 2)), "[012][3]");
  EXPECT_EQ(text_of(split_evenly(layers_of(chain({99, 2, 2, 2, 2})), 3)), "[0][1][23]");
  EXPECT_EQ(text_of(split_evenly(layers_of(chain({2, 2, 2})), 2)), "[0][1]");
  EXPECT_ERROR(UsageError, split_evenly(layers_of(chain({2, 2, 2})), 3), "2 layers", "3 stages", "1 to 2");
}

TEST(StageSplit, BuildStagesChecksThatTheModelIsCovered) {
  run_ranks(2, [](Rank& me) {
    const nn::Sequential model = chain({2, 3, 4, 5, 6});
    const PipelineLayers layers = layers_of(model);
    const auto stages = build_stages(*model, split_at(layers, {"2"}), "1F1B", me.group());
    ASSERT_EQ(stages.size(), 1);
    EXPECT_EQ(stages[0].stage_index(), me.rank);
    EXPECT_EQ(stages[0].names, me.rank == 0 ? (std::vector<std::string>{"0.weight", "0.bias", "1.weight", "1.bias"})
                                            : (std::vector<std::string>{"2.weight", "2.bias", "3.weight", "3.bias"}));
    EXPECT_EQ(stage_state_dict(*model, stages).names(), stages[0].names);
    const auto v = build_stages(*model, split_at(layers, {"1", "2", "3"}), "ZBVZeroBubble", me.group());
    EXPECT_EQ(v[1].stage_index(), me.rank == 0 ? 3 : 2);

    EXPECT_ERROR(UsageError, build_stages(*model, {{layers[0], layers[1]}, {layers[3]}}, "1F1B", me.group()),
                 "do not cover the model", "'2.weight' and 1 more");
    EXPECT_ERROR(UsageError, build_stages(*model, split_at(layers, {"1", "2"}), "LoopedBFS", me.group()),
                 "3 stages on 2 ranks", "2 or 4 stages");
    PipelineLayers other = layers;
    other.push_back(layers_of(chain({6, 7})).front());
    EXPECT_ERROR(UsageError, build_stages(*model, split_at(other, {"1"}), "1F1B", me.group()), "layer '0' of stage 1",
                 "not one of the model");
  });
}

// The first and the last layer of the chain use one weight, as a tied embedding does.
TEST(StageSplit, GradientsOfSharedParametersAreAdded) {
  for (const auto& [schedule, stages] :
       std::vector<std::pair<std::string, int64_t>>{{"GPipe", 3}, {"ZBVZeroBubble", 6}})
    run_ranks(3, [&](Rank& me) {
      const auto build = [&] {
        nn::Sequential model = chain(std::vector<int64_t>(stages + 1, 4));
        for (const auto& p : model->parameters())
          p.set_data(torch::linspace(-1, 1, p.numel(), torch::kDouble).view(p.sizes()).sin());
        return model;
      };
      const auto layers_with_tie = [](const nn::Sequential& model) {
        PipelineLayers layers = layers_of(model);
        const auto first = std::dynamic_pointer_cast<torch::nn::LinearImpl>(model->children()[0]);
        layers.push_back({"tied", [first](const at::Tensor& x) { return x.mm(first->weight); }, {first}});
        return layers;
      };
      const auto loss = [](const at::Tensor& y, const at::Tensor& target) { return (y - target).square().mean(); };
      const auto data = torch::linspace(0, 1, 32, torch::kDouble).view({8, 4});

      nn::Sequential plain = build();
      at::Tensor y = data;
      for (const PipelineLayer& layer : layers_with_tie(plain)) y = layer.forward(y);
      loss(y, data).backward();

      nn::Sequential model = build();
      PipelineLayers layers = layers_with_tie(model);
      std::vector<PipelineLayers> split = split_at(PipelineLayers(layers.begin(), layers.end() - 1), [&] {
        std::vector<std::string> begins;
        for (int64_t i = 1; i < stages; ++i) begins.push_back(std::to_string(i));
        return begins;
      }());
      split.back().push_back(layers.back());
      auto mine = build_stages(*model, split, schedule, me.group());
      PipelineSchedule pipeline(schedule, mine, 4, loss, me.group());
      pipeline.step(data, data);
      for (const PipelineStage& stage : mine)
        for (const std::string& name : stage.names)
          EXPECT_EQ(
              testing::close(get_parameter(*model, name).grad(), get_parameter(*plain, name).grad(), {1e-9, 1e-9}), "")
              << schedule << " rank " << me.rank << ' ' << name;
    });
}

}  // namespace
}  // namespace tessera::pipelining
