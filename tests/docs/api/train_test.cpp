// The examples of the API reference: checkpoint, models, data, pipelining, train, launch.
#include "docs/fixtures.h"
#include "docs/temporary_folder.h"
#include "tessera/testing/ranks.h"
#include "tessera/train/detail/metrics_file.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iostream>

namespace tessera::docs_train {
namespace {

namespace ts = tessera;
using ts::testing::Rank;
using ts::testing::run_ranks;

using Net = docs::FeedForward;

TEST(ApiCheckpoint, SaveAndLoad) {
  const TemporaryFolder here;
  run_ranks(2, [](Rank& me) {
    Net model(4);
    const int64_t steps = 200;
    const auto train_step = [] {};
    const auto dict = ts::get_model_state_dict(*model);
    // example: tessera/checkpoint/save.h
    const ts::dcp::SaveOptions options{.overwrite = true, .keep_latest = 3};
    ts::dcp::save(dict, ts::dcp::step_folder("out", 1000), {{"step", 1000}}, options);
    // end
    {
      // example: tessera/checkpoint/load.h
      auto dict = state_dict(*model);    // aliases of the parameters
      dcp::load(dict, "out/step-1000");  // fills the parameters
      auto step = dcp::read_values("out/step-1000").at("step");
      const ts::dcp::LoadOptions some{.strict = false, .prefix = "up."};  // only saved names that begin with up.
      ts::LoadReport report = ts::dcp::load(ts::state_dict(*model->up), "out/step-1000", some);
      auto state = dcp::optimizer_state_like("out/step-1000", "optimizer.", get_model_state_dict(*model));
      // end
      EXPECT_TRUE(report.empty());
      EXPECT_EQ(state.size(), 0u);  // of a checkpoint without optimizer
    }
    // example: tessera/checkpoint/save.h
    dcp::AsyncSave saving;
    for (int64_t step = 1; step <= steps; step++) {
      train_step();
      if (step % 100 == 0) saving = dcp::async_save(dict, dcp::step_folder("out", step), {}, {}, std::move(saving));
    }
    saving.wait();
    // end
    ts::barrier();
    if (me.rank == 0) {
      // example: tessera/checkpoint/folders.h
      for (const auto& [step, path] : ts::dcp::steps_in("out")) std::cout << step << ": " << path << "\n";
      const std::string newest = ts::dcp::latest("out").value();  // "out/step-1000"
      EXPECT_EQ(ts::dcp::step_of(newest), 1000);
      EXPECT_EQ(ts::dcp::parent_folder(newest), "out");
      EXPECT_EQ(ts::dcp::partial_folder(newest), "out/step-1000.partial");  // while it is written
      ts::dcp::remove_partial("out");                                       // what a crash has left
      ts::dcp::keep_latest("out", 1);                                       // removes all but the last one
      // end
      EXPECT_EQ(ts::dcp::steps_in("out").size(), 1);
    }
  });
}

TEST(ApiCheckpoint, Safetensors) {
  const TemporaryFolder here;
  // example: tessera/checkpoint/safetensors_file.h
  const ts::dcp::WriteOptions options{.metadata = {{"format", "pt"}}};
  ts::dcp::write_safetensors("model.safetensors", {{"w", torch::ones({2, 2})}}, options);
  dcp::SafetensorsFile file("model.safetensors");
  auto w = file.tensor(*file.find("w"));
  // end
  EXPECT_EQ(w.sum().item<double>(), 4);
  ts::nn::Linear model(2, 2);
  ts::dcp::write_safetensors("gpt.safetensors", {{"transformer.weight", torch::ones({2, 2})},
                                                 {"transformer.bias", torch::ones({2})},
                                                 {"lm_head.weight", torch::ones({1})}});
  // example: tessera/checkpoint/load.h
  auto report = ts::load_safetensors(*model, "gpt.safetensors",
                                     {.key_map = {{"transformer\\.(.*)", "$1"}, {"lm_head\\..*", ""}}});
  const ts::KeyRule rule{.pattern = "transformer\\.(.*)", .name = "$1"};
  const ts::LoadSafetensorsOptions what_fits{.key_map = {rule}, .strict = false};
  // end
  EXPECT_TRUE(report.empty());
}

TEST(ApiCheckpoint, TrainingState) {
  const TemporaryFolder here;
  run_ranks(2, [](Rank& me) {
    torch::manual_seed(7);
    Net model(4);
    ts::optim::SGD optimizer(model->parameters(), {.lr = 0.1});
    ts::optim::ExponentialLR scheduler(optimizer, 0.99);
    const int64_t epochs = 1;
    auto data = torch::data::datasets::TensorDataset(torch::ones({8, 4}))
                    .map(torch::data::transforms::Stack<torch::data::TensorExample>());
    // example: tessera/data/data_loader.h
    auto loader = ts::data::make_data_loader(data, torch::data::DataLoaderOptions().batch_size(4), /*seed=*/7);
    using Loader = std::remove_reference_t<decltype(*loader)>;  // a ts::data::DataLoader<Dataset>
    static_assert(std::is_same_v<Loader, ts::data::DataLoader<decltype(data)>>);
    // end
    // example: tessera/checkpoint/training_state.h
    ts::TrainingState state{model, optimizer, scheduler, *loader};
    state.load("out");  // continues from the last checkpoint, if there is one
    for (; state.epoch < epochs; state.epoch++)
      for (auto& batch : *loader) {  // continues in the middle of the epoch
        model(batch.data).sum().backward();
        optimizer.step();
        scheduler.step();
        if (++state.step % 100 == 0) state.save("out");  // out/step-100, out/step-200, ...
      }
    ts::torch_save(model, "model.pt");  // torch::load(plain_model, "model.pt")
    ts::torch_load(model, "model.pt");
    // end
    ts::barrier();
    auto net = Net(64);
    // example: tessera/checkpoint/training_state.h
    Net target = ts::clone(net, [] { return Net(64); });
    ts::copy_module_state(*net, *target);
    // end
    EXPECT_TRUE(target->up->weight.equal(net->up->weight));
    EXPECT_EQ(state.step, 2);
  });
}

TEST(ApiModels, Models) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto tokens = torch::zeros({1, 4}, torch::kLong), targets = tokens;
    using namespace ts::models;
    // example: tessera/models/gpt2.h
    const ts::models::GPT2Config small{.vocab_size = 16, .max_seq_len = 4, .n_layer = 1, .n_head = 2, .n_embd = 8};
    ts::models::GPT2 model(small);
    ts::models::GPT2Block block = (*model->h)[0];
    ts::models::GPT2Attention attention = block->attn;
    ts::models::GPT2MLP mlp = block->mlp;
    at::Tensor logits = model(tokens);
    // end
    // example: tessera/models/loss.h
    models::loss(model(tokens), targets).backward();
    at::Tensor sum = ts::models::loss_sum(model(tokens), targets);  // divide by the targets of all ranks
    // end
    // example: tessera/models/sizes.h
    for (const ts::models::Size& size : ts::models::all_sizes()) std::cout << size.name << "\n";
    const ts::models::Config& named = ts::models::find_config("gpt2-124m");
    std::cout << ts::models::parameter_count(named) << " parameters\n";
    const ts::models::PlanOptions plan_options{.loss_parallel = true};
    // end
    const GPT2Config config = small;
    {
      GPT2 model(config);
      // example: tessera/models/sizes.h
      parallelize_module(model, mesh["tp"], tensor_parallel_plan(config, {.sequence_parallel = true}));
      // end
    }
    // example: tessera/models/llama.h
    ts::models::LlamaConfig moe = std::get<ts::models::LlamaConfig>(ts::models::find_config("mixtral-tiny"));
    // end
    {
      const auto mesh = me.mesh("ep=2");
      // example: tessera/models/llama.h
      ts::models::Llama model(moe);
      expert_parallel(model, mesh["ep"]);
      model(tokens);
      for (const auto& layer : ts::models::router_statistics(model)) EXPECT_FALSE(layer.tokens_per_expert.empty());
      ts::models::update_expert_bias(model, mesh.get_group("ep"));
      // end
    }
    // example: tessera/models/llama.h
    ts::models::Llama dense(std::get<ts::models::LlamaConfig>(ts::models::find_config("llama-tiny")));
    ts::models::LlamaBlock layer = (*dense->layers)[0];
    ts::models::LlamaAttention attends = layer->attention;
    ts::models::LlamaFeedForward feeds = layer->feed_forward;
    // end
    EXPECT_EQ(logits.size(2), 16);
  });
}

std::shared_ptr<ts::models::GPT2Impl> large_model() {
  using namespace ts::models;
  // example: tessera/models/sizes.h
  GPT2 model(std::get<GPT2Config>(find_config("gpt2-124m")));
  // end
  return model.ptr();
}

TEST(ApiModels, LargeModel) {
  auto model = ts::deferred_init([] { return large_model(); });
  EXPECT_EQ(model->config.n_layer, 12);
}

TEST(ApiModels, Mlp) {
  // example: tessera/models/mlp.h
  const ts::models::MLPConfig config{
      .layers = {{"up", 4, 8, ts::models::Activation::Relu}, ts::models::MLPLayer{"down", 8, 4}}};
  ts::models::MLP model(config);
  at::Tensor y = model(torch::ones({1, 4}));
  ts::models::MLP of_pytorchs_tests(ts::models::mlp_module());
  const auto others = {ts::models::simple_model(), ts::models::simple_mlp(), ts::models::four_linears(/*width=*/4)};
  ts::models::MLPStacked stacked(/*n_layers=*/2);
  // end
  EXPECT_EQ(others.begin()->layers.size(), 3);
  EXPECT_EQ(y.size(1), 4);
}

// example: tessera/data/dataset.h
struct Counting : ts::data::Dataset {  // sample i: i, i + 1, i + 2 -> the next number
  int64_t samples() const override { return 64; }
  int64_t length() const override { return 3; }
  int64_t vocab_size() const override { return 128; }
  void read(int64_t sample, std::span<int64_t> input, std::span<int64_t> target) const override {
    for (size_t i = 0; i < 3; i++) input[i] = sample + static_cast<int64_t>(i), target[i] = input[i] + 1;
    target[0] = ts::data::kIgnored;  // the loss does not count it
  }
  int64_t counted() const override { return 2; }
};
// end

TEST(ApiData, Data) {
  const Counting dataset;
  const int64_t rank = 1, ranks = 2;
  {
    // example: tessera/data/sampler.h
    data::Sampler sampler({.samples = dataset.samples(), .batch = 32});
    auto batch = data::read_batch(dataset, sampler.next().rows_of(rank, ranks));
    // end
    EXPECT_EQ(batch.input.size(0), 16);
  }
  // example: tessera/data/sampler.h
  const ts::data::SamplerOptions options{.samples = 10, .batch = 4, .seed = 7, .last = ts::data::LastBatch::Pad};
  ts::data::Sampler sampler(options);
  ts::data::GlobalBatch global = sampler.next();
  for (const int64_t row : global.rows_of(rank, ranks)) EXPECT_NE(row, ts::data::kPadding);  // only in the last batch
  const ts::data::SamplerOptions generated{.samples = ts::data::kEndless, .batch = 4};
  // end
  // example: tessera/data/dataset.h
  ts::data::Batch batch = ts::data::read_batch(dataset, {0, 4});  // 2 x 3 tokens
  // end
  EXPECT_EQ(batch.input[1][0].item<int64_t>(), 4);
}

TEST(ApiData, TokenFile) {
  const TemporaryFolder here;
  std::ofstream("text.txt") << std::string(1000, 'a');
  // example: tessera/data/token_file.h
  const ts::data::TokenLayout layout = ts::data::parse_token_layout("text");
  auto file = std::make_shared<const ts::data::TokenFile>("text.txt", layout);
  std::cout << file->size() << " tokens of " << file->layout() << "\n";
  const ts::data::WindowOptions windows{.length = 16, .vocab_size = 256, .held_out = 0.1};
  ts::data::Split split = ts::data::token_windows(file, windows);                       // training and validation
  std::shared_ptr<const ts::data::Dataset> all = ts::data::all_windows(file, windows);  // for a validation file
  // end
  EXPECT_GT(split.training->samples(), split.held_out->samples());
  EXPECT_GT(all->samples(), split.training->samples());
}

TEST(ApiPipelining, Schedules) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("pp=2");
    torch::manual_seed(7);
    const auto input = torch::ones({4, 4}), target = torch::zeros({4, 4});
    {
      using ts::pipelining::split_at;
      const ts::models::GPT2Config config{.vocab_size = 16, .max_seq_len = 4, .n_layer = 12, .n_head = 2, .n_embd = 8};
      ts::models::GPT2 model(config);
      const auto layers = ts::models::pipeline_layers(model);
      // example: tessera/pipelining/schedule.h
      auto three_stages = split_at(layers, {"h.4", "h.8"});
      // end
      EXPECT_EQ(three_stages.size(), 3);
    }
    // example: tessera/pipelining/schedule.h
    ts::nn::Sequential model(ts::nn::Linear(4, 4), ts::nn::ReLU(), ts::nn::Linear(4, 4));
    const ts::pipelining::PipelineLayers layers = ts::pipelining::layers_of(model);
    const ts::pipelining::PipelineLayer& first = layers[0];
    auto split = ts::pipelining::split_at(layers, {"2"});  // the second stage begins at the last Linear
    const ts::pipelining::LossFn loss_fn = [](const at::Tensor& output, const at::Tensor& target) {
      return torch::mse_loss(output, target);
    };
    auto stages = ts::pipelining::build_stages(*model, split, "GPipe", mesh["pp"]);
    const ts::pipelining::PipelineStage& mine = stages[0];
    for (const ts::pipelining::SharedParameter& shared : mine.shared)
      std::cout << shared.stages << "\n";                                   // tied weights
    ts::StateDict dict = ts::pipelining::stage_state_dict(*model, stages);  // dcp::save and dcp::load take it
    const ts::pipelining::ScheduleOptions options{.scale_grads = true};
    ts::pipelining::ScheduleGPipe schedule(stages, /*n_microbatches=*/4, loss_fn, mesh["pp"], options);
    auto losses = schedule.step(input, target);
    ts::pipelining::PipelineSchedule& any = schedule;
    at::Tensor output = any.eval(input);
    // end
    EXPECT_EQ(losses.size(), me.rank == 1 ? 4 : 0);
    EXPECT_FALSE(first.name.empty());
    EXPECT_FALSE(dict.empty());
  });
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("pp=2");
    torch::manual_seed(7);
    const auto input = torch::ones({4, 4}), target = torch::zeros({4, 4});
    // example: tessera/pipelining/schedule.h
    ts::nn::Sequential deep(ts::nn::Linear(4, 4), ts::nn::Linear(4, 4), ts::nn::Linear(4, 4), ts::nn::Linear(4, 4));
    auto four = ts::pipelining::split_evenly(ts::pipelining::layers_of(deep), 4);  // two stages per rank
    auto loss = [](const at::Tensor& output, const at::Tensor& target) { return torch::mse_loss(output, target); };
    auto in_loops = ts::pipelining::build_stages(*deep, four, "LoopedBFS", mesh["pp"]);
    ts::pipelining::ScheduleInterleaved1F1B(in_loops, 4, loss, mesh["pp"]).step(input, target);
    ts::pipelining::ScheduleLoopedBFS(in_loops, 4, loss, mesh["pp"]).step(input, target);
    ts::pipelining::ScheduleInterleavedZeroBubble(in_loops, 4, loss, mesh["pp"]).step(input, target);
    auto in_a_v = ts::pipelining::build_stages(*deep, four, "ZBVZeroBubble", mesh["pp"]);  // ranks 0 1 1 0
    ts::pipelining::ScheduleZBVZeroBubble(in_a_v, 4, loss, mesh["pp"]).step(input, target);
    ts::pipelining::ScheduleDualPipeV(in_a_v, 4, loss, mesh["pp"]).step(input, target);
    // end
    EXPECT_EQ(in_loops.size(), 2);
  });
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("pp=1,fsdp=2");
    torch::manual_seed(7);
    ts::nn::Sequential model(ts::nn::Linear(4, 4));
    using namespace ts::pipelining;
    PipelineStage stage(model, 0, 1);
    // example: tessera/pipelining/schedule.h
    fully_shard(stage.module(), {.mesh = mesh["fsdp"]});
    use_fully_shard(stage);
    // end
    EXPECT_TRUE(static_cast<bool>(stage.reduce_grad));
  });
}

TEST(ApiTrain, Config) {
  // example: tessera/train/config.h
  ts::train::TrainConfig config;
  config.model = ts::train::ModelOptions{.name = "gpt-tiny", .layers = 1};
  config.data = ts::train::DataOptions{.path = "arithmetic"};
  config.parallel = ts::train::ParallelOptions{.mesh = "dp=2,tp=2"};
  config.training = ts::train::TrainingOptions{.steps = 100, .batch = 16};
  config.optimizer = ts::train::OptimizerOptions{.lr = 3e-4, .schedule = "wsd"};
  config.eval = ts::train::EvalOptions{.every = 50};
  config.guard = ts::train::GuardOptions{.on_nan = "skip"};
  config.metrics = ts::train::MetricsOptions{.output = "out"};
  config.checkpoint = ts::train::CheckpointOptions{.every = 50, .async = true, .resume = "auto"};
  ts::train::set_option(config, "training.steps",
                        ts::train::option_text(int64_t{200}));  // as in TOML and on the command line
  std::cout << config;                                          // TOML
  ts::train::check(config, /*ranks=*/4);

  const ts::models::Config model = ts::train::model_config(config.model);
  const ts::MeshShape mesh = ts::train::mesh_shape(config, ts::train::ranks_of(config.parallel));
  EXPECT_EQ(ts::train::extent(mesh, "tp"), 2);
  EXPECT_EQ(ts::train::expert_ranks(config.parallel), 1);  // of the axis ep
  EXPECT_GT(ts::train::sequence_length(config), 0);
  EXPECT_EQ(ts::train::checkpoint_folder(config), "out/checkpoints");
  // end
}

TEST(ApiTrain, Plan) {
  const auto x = torch::ones({2, 64});
  // example: tessera/train/plan.h
  std::cout << ts::plan([] { return Net(64); }, {{"fsdp", 8}, {"tp", 2}},
                        {{"up", ts::ColwiseParallel()}, {"down", ts::RowwiseParallel()}}, x);
  const ts::PlannedMesh axes{{"dp", 2}};
  const ts::StepPlan step = ts::plan([] { return Net(64); }, axes, {}, x);

  ts::train::TrainConfig config;
  ts::train::set_option(config, "parallel.mesh", "pp=2,dp=2");
  ts::train::set_option(config, "model.layers", "2");
  EXPECT_TRUE(ts::train::config_errors(config, /*ranks=*/4).empty());
  const ts::train::TrainPlan plan = ts::train::plan_training(config, 4);
  for (const ts::train::PlannedParameter& p : plan.parameters) std::cout << p.name << " " << p.placements << "\n";
  for (const ts::train::PlannedTraffic& t : plan.traffic) std::cout << t.axis << ": " << t.what << "\n";
  for (const ts::train::PlannedMemory& m : plan.memory) std::cout << m.kind << ": " << m.bytes << " bytes\n";
  const ts::train::PlannedPipeline& pipeline = plan.pipeline.value();
  for (const ts::train::PlannedStages& rank : pipeline.ranks) std::cout << rank.stages << "\n";
  // end
  EXPECT_EQ(step.parameters.size(), 4);
}

TEST(ApiTrain, Report) {
  run_ranks(1, [](Rank&) {
    Net model(4);
    ts::optim::SGD optimizer(model->parameters(), {.lr = 0.1});
    const auto next_batch = [] { return torch::ones({2, 4}); };
    using docs::train_step;
    // example: tessera/train/plan.h
    auto measured = ts::report([&] { train_step(model, optimizer, next_batch()); });
    if (ts::get_rank() == 0) std::cout << measured;
    const ts::StepReport& same = measured;
    // end
    EXPECT_EQ(same.steps, 10);
  });
}

TEST(ApiTrain, Trainer) {
  const TemporaryFolder here;
  using namespace ts::train;
  TrainConfig config;
  for (const auto& [key, value] : std::map<std::string, std::string>{{"model.layers", "1"},
                                                                     {"model.dim", "16"},
                                                                     {"model.heads", "2"},
                                                                     {"training.steps", "2"},
                                                                     {"training.batch", "4"},
                                                                     {"eval.samples", "8"},
                                                                     {"eval.sample_tokens", "0"}})
    set_option(config, key, value);
  const std::string path = "metrics.jsonl";
  const auto run_training = [&] {
    // example: tessera/train/trainer.h
    const auto world = init();
    Trainer trainer(config, world);
    if (world.rank() == 0) trainer.add(std::make_shared<MetricsFile>(path));
    auto result = trainer.run();
    const ts::train::TrainResult& same = result;
    const std::string resumed = ts::train::find_checkpoint(config);  // "": none
    // end
    EXPECT_EQ(same.steps, 2);
    EXPECT_EQ(resumed, "");
    Net model(4);
    const double loss = 0.5;
    const int64_t step = 1;
    // example: tessera/train/trainer.h
    ts::SummaryWriter writer("runs/1");
    writer.add_scalar("loss", loss, step);
    writer.add_histograms(*model, step);  // weights, and gradients after backward
    // end
  };
  run_training();
  ts::destroy();
}

int start() {
  using namespace ts::launch;
  // example: tessera/launch/launcher.h
  RunOptions options{.command = {"./app", "--lr", "3e-4"}, .nproc_per_node = 4};
  return run(options);
  // end
}

TEST(ApiLaunch, Launcher) {
  const TemporaryFolder here;
  std::ofstream("app") << "#!/bin/sh\necho rank $RANK\n";
  std::filesystem::permissions("app", std::filesystem::perms::owner_all);
  EXPECT_EQ(start(), 0);
  // example: tessera/launch/launcher.h
  const ts::launch::Address address = ts::launch::parse_address("head:29400");
  // end
  EXPECT_EQ(address.port, 29400);
}

}  // namespace
}  // namespace tessera::docs_train
