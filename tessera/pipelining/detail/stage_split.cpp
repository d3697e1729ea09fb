#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/error.h"
#include "tessera/pipelining/detail/schedules.h"
#include "tessera/pipelining/schedule.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>

namespace tessera::pipelining {
namespace {

std::vector<std::string> names_of(const PipelineLayers& layers) {
  std::vector<std::string> names;
  for (const PipelineLayer& layer : layers) names.push_back(layer.name);
  return names;
}

std::vector<PipelineLayers> split_before(const PipelineLayers& layers, const std::set<size_t>& begins) {
  std::vector<PipelineLayers> stages(1);
  for (size_t i = 0; i < layers.size(); ++i) {
    if (begins.contains(i)) stages.emplace_back();
    stages.back().push_back(layers[i]);
  }
  return stages;
}

int64_t parameters_of(const PipelineLayer& layer) {
  int64_t count = 0;
  for (const auto& module : layer.modules)
    for (const at::Tensor& parameter : module->parameters()) count += parameter.numel();
  return count;
}

// The parameters and buffers below the modules of a layer.
std::vector<at::Tensor> tensors_of_layer(const PipelineLayer& layer) {
  std::vector<at::Tensor> tensors;
  for (const auto& module : layer.modules) {
    for (const at::Tensor& parameter : module->parameters()) tensors.push_back(parameter);
    for (const at::Tensor& buffer : module->buffers()) tensors.push_back(buffer);
  }
  return tensors;
}

}  // namespace

PipelineLayers layers_of(const nn::Sequential& model) {
  PipelineLayers layers;
  auto child = model->begin();
  for (const auto& item : model->named_children()) {
    torch::nn::AnyModule any = *child++;
    layers.push_back({item.key(), [any](const at::Tensor& x) mutable { return any.forward(x); }, {item.value()}});
  }
  return layers;
}

std::vector<PipelineLayers> split_at(const PipelineLayers& layers, const std::vector<std::string>& begins) {
  const std::vector<std::string> names = names_of(layers);
  std::set<size_t> indices;
  for (const std::string& begin : begins) {
    const size_t index = std::ranges::find(names, begin) - names.begin();
    TESSERA_CHECK(index < names.size(), UsageError, "split_at: the chain has no layer '", begin, "'; ",
                  did_you_mean(begin, names), " It begins with '", names.empty() ? "" : names.front(),
                  "' and ends with '", names.empty() ? "" : names.back(), "'");
    TESSERA_CHECK(index > 0, UsageError, "split_at: '", begin,
                  "' is the first layer, where stage 0 begins anyway. Name the first layers of stages 1, 2, ...");
    TESSERA_CHECK(indices.insert(index).second, UsageError, "split_at: '", begin, "' is named twice");
  }
  return split_before(layers, indices);
}

std::vector<PipelineLayers> split_evenly(const PipelineLayers& layers, int64_t stages) {
  const auto count = static_cast<int64_t>(layers.size());
  TESSERA_CHECK(stages >= 1 && stages <= count, UsageError, "split_evenly: ", count, " layers cannot be split into ",
                stages, " stages. Write 1 to ", count, " stages");
  // best[s][i]: the smallest possible maximum over s stages of the first i layers, where each layer counts its
  // parameters and 1, so that layers without parameters are divided too. from[s][i]: where the last stage begins.
  std::vector<int64_t> sum(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) sum[i + 1] = sum[i] + parameters_of(layers[i]) + 1;
  const int64_t none = std::numeric_limits<int64_t>::max();
  std::vector<std::vector<int64_t>> best(stages + 1, std::vector<int64_t>(count + 1, none)), from = best;
  best[0][0] = 0;
  for (int64_t s = 1; s <= stages; ++s)
    for (int64_t i = s; i <= count; ++i)
      for (int64_t begin = s - 1; begin < i; ++begin) {
        if (best[s - 1][begin] == none) continue;
        const int64_t largest = std::max(best[s - 1][begin], sum[i] - sum[begin]);
        if (largest < best[s][i]) best[s][i] = largest, from[s][i] = begin;
      }
  std::set<size_t> begins;
  for (int64_t s = stages, i = count; s > 1; --s) {
    i = from[s][i];
    begins.insert(static_cast<size_t>(i));
  }
  return split_before(layers, begins);
}

PipelineStage::PipelineStage(const PipelineLayers& layers, int64_t stage_index, int64_t num_stages)
    : PipelineStage(
          [&] {
            std::vector<StageForward> forwards;
            StageChildren children;
            for (const PipelineLayer& layer : layers) {
              forwards.push_back(layer.forward);
              for (const auto& module : layer.modules) {
                const bool known = std::ranges::any_of(children, [&](const auto& c) { return c.second == module; });
                if (!known) children.emplace_back(c10::str("module_", children.size()), module);
              }
            }
            return StageModule(
                [forwards](const at::Tensor& x) {
                  at::Tensor y = x;
                  for (const StageForward& forward : forwards) y = forward(y);
                  return y;
                },
                children);
          }(),
          stage_index, num_stages) {}

PipelineStage::PipelineStage(StageModule module, int64_t stage_index, int64_t num_stages)
    : module_(std::move(module)), stage_index_(stage_index), num_stages_(num_stages) {
  TESSERA_CHECK(num_stages >= 1 && stage_index >= 0 && stage_index < num_stages, UsageError, "PipelineStage: stage ",
                stage_index, " of ", num_stages, " stages. Stages count from 0");
}

std::vector<PipelineStage> build_stages(const torch::nn::Module& model, const std::vector<PipelineLayers>& split,
                                        std::string_view schedule, const GroupRef& group) {
  const auto num_stages = static_cast<int64_t>(split.size());
  const int64_t ranks = group->size();
  TESSERA_CHECK(num_stages >= ranks && num_stages % ranks == 0, UsageError, "build_stages: ", num_stages, " stages on ",
                ranks, " ranks of the pipeline. Each rank has the same number of stages: split the model ", "into ",
                ranks, " or ", 2 * ranks, " stages");

  std::map<at::TensorImpl*, std::vector<int64_t>> users;  // stages that use a parameter or buffer
  for (int64_t stage = 0; stage < num_stages; ++stage)
    for (const PipelineLayer& layer : split[stage])
      for (const at::Tensor& tensor : tensors_of_layer(layer)) {
        std::vector<int64_t>& stages = users[tensor.unsafeGetTensorImpl()];
        if (stages.empty() || stages.back() != stage) stages.push_back(stage);
      }
  std::vector<std::string> missing;
  std::set<at::TensorImpl*> known;
  const auto visit = [&](const std::string& name, const at::Tensor& tensor) {
    known.insert(tensor.unsafeGetTensorImpl());
    if (!users.contains(tensor.unsafeGetTensorImpl())) missing.push_back(name);
  };
  const auto parameters = model.named_parameters(), buffers = model.named_buffers();
  for (const auto& item : parameters) visit(item.key(), item.value());
  for (const auto& item : buffers) visit(item.key(), item.value());
  TESSERA_CHECK(missing.empty(), UsageError, "build_stages: the stages do not cover the model: no layer uses '",
                missing.empty() ? "" : missing[0], "'",
                missing.size() > 1 ? c10::str(" and ", missing.size() - 1, " more") : "",
                ". List its module in the `modules` of a layer, and pass every layer to split_at or split_evenly");
  for (int64_t stage = 0; stage < num_stages; ++stage)
    for (const PipelineLayer& layer : split[stage])
      for (const at::Tensor& tensor : tensors_of_layer(layer))
        TESSERA_CHECK(known.contains(tensor.unsafeGetTensorImpl()), UsageError, "build_stages: layer '", layer.name,
                      "' of stage ", stage, " has a parameter or buffer of sizes ", tensor.sizes(),
                      " that is not one of the model. Make the layers from the same model");

  const std::vector<int64_t> rank_of = stage_ranks(schedule, {ranks, num_stages / ranks, 1});
  std::vector<PipelineStage> mine;
  for (int64_t index = 0; index < num_stages; ++index) {
    if (rank_of[index] != group->rank()) continue;
    PipelineStage stage(split[index], index, num_stages);
    const auto add_name = [&](const std::string& name, const at::Tensor& tensor) {
      const std::vector<int64_t>& stages = users.at(tensor.unsafeGetTensorImpl());
      if (std::ranges::find(stages, index) == stages.end()) return false;
      stage.names.push_back(name);
      return stages.size() > 1;
    };
    for (const auto& item : parameters)
      if (add_name(item.key(), item.value()))
        stage.shared.push_back({item.value(), users.at(item.value().unsafeGetTensorImpl())});
    for (const auto& item : buffers) add_name(item.key(), item.value());
    mine.push_back(std::move(stage));
  }
  return mine;
}

StateDict stage_state_dict(const torch::nn::Module& model, const std::vector<PipelineStage>& stages) {
  std::set<std::string> names;
  for (const PipelineStage& stage : stages) names.insert(stage.names.begin(), stage.names.end());
  StateDict dict;
  const auto add = [&](const auto& items) {
    for (const auto& item : items)
      if (names.contains(item.key())) dict.insert(item.key(), item.value().detach());
  };
  add(model.named_parameters());
  add(model.named_buffers());
  return dict;
}

}  // namespace tessera::pipelining
