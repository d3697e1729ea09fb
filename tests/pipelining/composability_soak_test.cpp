// Trainings on meshes with pp, dp, fsdp, cp, tp and ep have the losses and parameters of one rank, in float64. `make
// soak` runs all meshes, every test run some.
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/sizes.h"
#include "tessera/optim/adam.h"
#include "tessera/pipelining/schedule.h"
#include "tessera/tensor_parallel/context_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/detail/soak.h"
#include "tessera/testing/spawn.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>

namespace tessera::pipelining {
namespace {

using tessera::testing::Rank;
using tessera::testing::run_ranks;

constexpr int64_t kVocab = 24, kBatch = 16, kLength = 8, kSteps = 20;

const models::GPT2Config kGpt{.vocab_size = kVocab, .max_seq_len = kLength, .n_layer = 4, .n_head = 2, .n_embd = 8};
const models::LlamaConfig kLlama{.vocab_size = kVocab,
                                 .max_seq_len = kLength,
                                 .n_layers = 4,
                                 .n_heads = 2,
                                 .n_kv_heads = 2,
                                 .dim = 8,
                                 .ffn_dim = 12,
                                 .rope_theta = 10000};
models::LlamaConfig tied_llama() {
  auto config = kLlama;
  config.tied = true;
  return config;
}
models::LlamaConfig mixtral() {
  auto config = kLlama;
  config.moe = {.n_experts = 4, .aux_loss_weight = 0};  // the auxiliary loss depends on the tokens of a rank
  return config;
}

// The batch of one step, on all ranks.
struct Batch {
  explicit Batch(int64_t step) {
    const at::Tensor all =
        torch::arange(kBatch * (kLength + 1)).mul(7).add(3 * step).remainder(kVocab).view({kBatch, -1});
    input = all.narrow(1, 0, kLength).contiguous();
    target = all.narrow(1, 1, kLength).contiguous();
  }
  at::Tensor input, target;
};

optim::AdamW make_adam(const std::vector<at::Tensor>& parameters) {
  return optim::AdamW(parameters, optim::AdamWOptions{.lr = 1e-2});
}

struct TrainingRun {
  std::vector<double> losses;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
};

template <class Model>
TrainingRun train_on_one_rank(const Model& initial) {
  Model model = clone(initial);
  auto optimizer = make_adam(model->parameters());
  TrainingRun run;
  for (int64_t step = 0; step < kSteps; ++step) {
    const Batch batch(step);
    optimizer.zero_grad();
    const at::Tensor loss = models::loss(model(batch.input), batch.target);
    loss.backward();
    optimizer.step();
    run.losses.push_back(loss.template item<double>());
  }
  for (const auto& item : model->named_parameters()) run.parameters.emplace_back(item.key(), item.value().detach());
  return run;
}

struct PipelineCase {
  std::string mesh;
  std::string schedule = "1F1B";
  int64_t microbatches = 4;
  bool sequence_parallel = false;
  bool always = false;     // not only in `make soak`
  bool processes = false;  // ranks are processes with shared memory, instead of threads
};

PipelineCase always(PipelineCase each) {
  each.always = true;
  return each;
}
PipelineCase in_processes(PipelineCase each) {
  each.processes = true;
  return each;
}

template <class Model, class Config>
void expect_like_one_rank(const PipelineCase& each, const Config& config) {
  if (!each.always && !tessera::testing::long_soak()) return;
  SCOPED_TRACE(each.mesh + " " + each.schedule);
  at::set_num_threads(1);  // every process computes the training on one rank too, at the same time
  torch::manual_seed(3);
  Model initial(config);
  initial->to(torch::kDouble);
  const TrainingRun expected = train_on_one_rank(initial);
  const MeshShape shape = parse_mesh_shape(each.mesh);
  const int64_t ranks = c10::multiply_integers(shape.shape);
  const auto has = [&](const char* axis) { return std::ranges::find(shape.names, axis) != shape.names.end(); };
  const auto body = [&](Rank& me) {
    const DeviceMesh mesh = me.mesh(each.mesh);
    Model model = clone(initial);
    if constexpr (std::is_same_v<Model, models::Llama>)
      if (has("ep")) models::expert_parallel(model, mesh["ep"]);
    if (has("tp"))
      parallelize_module(model, mesh["tp"],
                         models::tensor_parallel_plan(config, {.sequence_parallel = each.sequence_parallel}),
                         {.src_data_rank = std::nullopt});
    const comm::Group pp = mesh.get_group("pp");
    const bool several = each.schedule != "1F1B" && each.schedule != "GPipe";
    const auto split = split_evenly(models::pipeline_layers(model), pp->size() * (several ? 2 : 1));
    std::vector<PipelineStage> stages = build_stages(*model, split, each.schedule, pp);

    int64_t data_ranks = 1, data_rank = 0;
    for (const std::string axis : {"dp", "fsdp", "ep"}) {
      if (!has(axis.c_str())) continue;
      data_rank = data_rank * mesh.size(axis) + mesh.get_local_rank(axis);
      data_ranks *= mesh.size(axis);
    }
    std::vector<at::Tensor> parameters;
    for (PipelineStage& stage : stages) {
      if (has("tp")) stage.mesh = mesh["tp"];
      if (has("fsdp")) {
        fully_shard(stage.module(), {.mesh = mesh["fsdp"]});
        use_fully_shard(stage);
      }
      for (const std::string axis : {"dp", "ep", "cp"})
        if (has(axis.c_str())) average_gradients(stage, mesh.get_group(axis));
      for (const at::Tensor& parameter : stage.parameters())
        if (std::ranges::none_of(parameters, [&](const at::Tensor& p) { return p.is_same(parameter); }))
          parameters.push_back(parameter);
    }
    std::optional<ContextParallel> context;
    if (has("cp")) context.emplace(mesh["cp"]);
    const auto mine = [&](const at::Tensor& x) {
      const at::Tensor rows = x.chunk(data_ranks)[data_rank];
      return context ? context->shard(rows, 1) : rows;
    };
    const auto loss_ranks = static_cast<double>(data_ranks * (has("cp") ? mesh.size("cp") : 1));
    const double scale = loss_ranks / (kBatch * kLength);  // gradients are averaged over these ranks
    PipelineSchedule schedule(
        each.schedule, stages, each.microbatches,
        [&](const at::Tensor& logits, const at::Tensor& target) { return models::loss_sum(logits, target) * scale; },
        pp, {.scale_grads = false});
    auto optimizer = make_adam(parameters);
    for (int64_t step = 0; step < kSteps; ++step) {
      const Batch batch(step);
      optimizer.zero_grad();
      at::Tensor loss = torch::zeros({}, torch::kDouble);
      for (const at::Tensor& part : schedule.step(mine(batch.input), mine(batch.target))) loss += part;
      optimizer.step();
      me.group()->all_reduce(loss, ReduceOp::Sum).wait();  // only ranks of the last stage have one
      const double copies = has("tp") ? static_cast<double>(mesh.size("tp")) : 1;
      EXPECT_NEAR(loss.item<double>() / (copies * loss_ranks), expected.losses[step], 1e-9) << "step " << step;
    }
    for (const auto& [name, value] : expected.parameters) {
      const bool here = std::ranges::any_of(stages, [&, &name = name](const PipelineStage& stage) {
        return std::ranges::find(stage.names, name) != stage.names.end();
      });
      if (!here) continue;
      const at::Tensor found = get_parameter(*model, name).detach();
      EXPECT_EQ(tessera::testing::close(is_dtensor(found) ? DTensor(found).full_tensor() : found, value, {1e-9, 1e-9}),
                "")
          << name << " on rank " << me.rank;
    }
  };
  if (each.processes)
    tessera::testing::spawn_ranks(ranks, body, {.backend = "shm"});
  else
    run_ranks(ranks, body);
}

// A checkpoint of four stages loads on two, with a schedule that gives a rank the first and the last of four, and on
// one.
TEST(Composability, CheckpointsLoadOnAnyNumberOfStages) {
  torch::manual_seed(3);
  models::GPT2 saved(kGpt);
  const std::string path =
      (std::filesystem::temp_directory_path() / c10::str("tessera_pipeline_test_", getpid())).string();
  const auto stages_of = [&](models::GPT2& model, int64_t stages, const std::string& schedule,
                             const comm::Group& group) {
    return build_stages(*model, split_evenly(models::pipeline_layers(model), stages), schedule, group);
  };
  run_ranks(4, [&](Rank& me) {
    models::GPT2 model = clone(saved);
    dcp::save(stage_state_dict(*model, stages_of(model, 4, "1F1B", me.group())), path, {}, {}, me.world);
  });
  struct LoadCase {
    int64_t ranks, stages;
    const char* schedule;
  };
  for (const LoadCase& each : {LoadCase{2, 2, "1F1B"}, LoadCase{2, 4, "ZBVZeroBubble"}, LoadCase{1, 1, "GPipe"}})
    run_ranks(each.ranks, [&](Rank& me) {
      models::GPT2 model = clone(saved);
      for (const at::Tensor& parameter : model->parameters()) parameter.data().zero_();
      const StateDict dict = stage_state_dict(*model, stages_of(model, each.stages, each.schedule, me.group()));
      const LoadReport report = dcp::load(dict, path, {.strict = false}, me.world);  // other stages have other names
      EXPECT_TRUE(report.missing.empty() && report.mismatched.empty()) << report;
      for (const auto& [name, tensor] : dict) EXPECT_TRUE(tensor.equal(get_parameter(*saved, name))) << name;
      EXPECT_TRUE(each.ranks > 1 || dict.size() == saved->parameters().size());
    });
  std::filesystem::remove_all(path);
}

TEST(Composability, Gpt) {
  for (const PipelineCase& each : std::vector<PipelineCase>{
           {"pp=2", "GPipe"},
           {"pp=2"},
           {"pp=2", "Interleaved1F1B"},
           {"pp=2", "LoopedBFS"},
           {"pp=2", "InterleavedZeroBubble"},
           always({"pp=2", "ZBVZeroBubble"}),
           {"pp=2", "DualPipeV"},
           {"pp=4"},
           {"pp=2,dp=2"},
           {"pp=2,tp=2"},
           {"pp=2,tp=2", "1F1B", 4, true},
           {"pp=2,tp=2", "ZBVZeroBubble", 4, true},
           {"pp=2,fsdp=2"},
           {"pp=2,cp=2"},
           {"pp=2,dp=2,tp=2", "Interleaved1F1B"},
           always({"pp=2,dp=2,cp=2,tp=2", "1F1B"}),
           {"pp=2,cp=4", "GPipe"},
           {"pp=4,dp=2,tp=2"},
       })
    expect_like_one_rank<models::GPT2>(each, kGpt);
}

TEST(Composability, Llama) {
  for (const PipelineCase& each : std::vector<PipelineCase>{
           {"pp=2", "ZBVZeroBubble"},
           {"pp=2,cp=2", "InterleavedZeroBubble"},
           {"pp=2,tp=2", "Interleaved1F1B"},
           always({"pp=2,fsdp=2", "LoopedBFS"}),
           {"pp=2,fsdp=2", "ZBVZeroBubble"},
           {"pp=2,dp=2,tp=2"},
           {"pp=2,cp=2,tp=2", "ZBVZeroBubble"},
           {"pp=1,cp=4,tp=2"},
           {"pp=3,fsdp=2", "DualPipeV", 6},
       })
    expect_like_one_rank<models::Llama>(each, kLlama);
  expect_like_one_rank<models::Llama>(always({"pp=2,dp=2"}), tied_llama());
  expect_like_one_rank<models::Llama>({"pp=2,fsdp=2"}, tied_llama());
}

TEST(Composability, Mixtral) {
  for (const PipelineCase& each : std::vector<PipelineCase>{
           always({"pp=2,ep=2"}),
           {"pp=2,ep=2,tp=2", "ZBVZeroBubble"},
           {"pp=1,ep=4"},
           {"pp=2,dp=2,ep=2", "Interleaved1F1B"},
       })
    expect_like_one_rank<models::Llama>(each, mixtral());
}

TEST(Composability, Processes) {
  expect_like_one_rank<models::GPT2>(always(in_processes({"pp=2", "ZBVZeroBubble"})), kGpt);
  expect_like_one_rank<models::GPT2>(in_processes({"pp=2,dp=2", "ZBVZeroBubble"}), kGpt);
  expect_like_one_rank<models::GPT2>(in_processes({"pp=2,tp=2", "1F1B", 4, true}), kGpt);
  expect_like_one_rank<models::Llama>(in_processes({"pp=2,fsdp=2"}), kLlama);
  expect_like_one_rank<models::Llama>(in_processes({"pp=2,ep=2", "Interleaved1F1B"}), mixtral());
}

}  // namespace
}  // namespace tessera::pipelining
