#include "tessera/train/trainer.h"

#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/debug/detail/step_profiler.h"
#include "tessera/train/detail/check_replicas.h"
#include "tessera/train/detail/device.h"
#include "tessera/train/detail/memory_check.h"
#include "tessera/train/detail/router.h"

#include <ATen/ops/zeros.h>

#include <chrono>
#include <filesystem>

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

const TrainConfig& checked(const TrainConfig& config, const World& world) {
  check(config, world.size());
  check_device(config.training.device);
  check_memory(config, world.size(), 1);
  TESSERA_CHECK(config.checkpoint.every == 0 || !checkpoint_folder(config).empty(), UsageError, "checkpoint.every is ",
                config.checkpoint.every,
                ", but the checkpoint folder is not set; set checkpoint.folder or metrics.output");
  return config;
}

DeviceMesh make_mesh(const TrainConfig& config, const World& world) {
  const auto shape = mesh_shape(config, world.size());
  return init_device_mesh(world, config.training.device, shape.shape, shape.names);
}

data::SamplerOptions sampler_options(const TrainConfig& config, const data::Dataset& dataset) {
  return {.samples = dataset.samples(),
          .batch = config.training.batch,
          .seed = config.training.seed,
          .last = config.data.last_batch == "pad" ? data::LastBatch::Pad : data::LastBatch::Drop};
}

double peak_tflops(const TrainConfig& config, at::Device device) {
  return config.metrics.peak_tflops > 0 ? config.metrics.peak_tflops
                                        : known_peak_tflops(device_name(device), config.training.precision);
}

// All ranks use the checkpoint that rank 0 finds.
std::string agree_on_checkpoint(const TrainConfig& config, const World& world) {
  if (config.checkpoint.resume.empty()) return "";
  return comm::gather_decide_broadcast(
      world.group(), "resuming", [] { return std::string(); }, [&](const auto&) { return find_checkpoint(config); });
}

std::vector<int64_t> all_gather_number(const World& world, int64_t number) {
  auto all = at::zeros({world.size()}, at::kLong);
  all[world.rank()] = number;
  world.group()->all_reduce(all, ReduceOp::Sum).wait();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()};
}

}  // namespace

Trainer::Trainer(const TrainConfig& config, const World& world)
    : world_(world),
      config_(checked(config, world)),
      device_(config.training.device),
      data_(open_data(config)),
      model_(config, make_mesh(config, world)),
      optimizer_(make_optimizer(config.optimizer, model_)),
      scheduler_(*optimizer_, learning_rate_factor(config.optimizer, config.training.steps)),
      train_step_(config, model_, *optimizer_),
      loader_(data_.training, sampler_options(config, *data_.training), model_.data_rank(), model_.data_ranks(),
              static_cast<size_t>(config.data.prefetch)),
      loss_monitor_(config.guard),
      parameter_bytes_(all_gather_number(world, model_.parameter_bytes())),
      peak_tflops_(peak_tflops(config, device_)) {
  if (config.guard.checksum_every > 0) check_replicas(model_, "before the first step");
  if (const auto path = agree_on_checkpoint(config, world); !path.empty()) resume(path);
}

Trainer::~Trainer() = default;

Trainer::StepOutcome Trainer::step() {
  begin_profile();
  const auto start = Clock::now();
  const auto loaded = loader_.next();
  StepOutcome outcome;
  auto& metrics = outcome.metrics;
  metrics.step = ++step_;
  metrics.lr = optimizer_->lr(0);
  metrics.data_seconds = loader_.seconds_waited();
  const auto recompiles = train_step_.recompiles().size();
  {
    const TrafficCount traffic;
    const auto result =
        train_step_.forward_backward(loaded.batch.input.to(device_), loaded.batch.target.to(device_), loaded.counted);
    saving_.wait_staging();  // forward and backward change nothing that a checkpoint has
    metrics.grad_norm = result.grad_norm.item<double>();
    metrics.traffic = traffic.by_axis();
    metrics.loss = mean_over_data(result.loss, &metrics.max_loss);
  }
  outcome.verdict = loss_monitor_.check(metrics.loss, metrics.grad_norm, config_.training.precision == "fp16");
  if (outcome.verdict.action == LossMonitor::Action::Continue) {
    train_step_.update();
  } else {
    train_step_.skip();
    metrics.skipped = outcome.verdict.reason;
  }
  if (const auto reasons = train_step_.recompiles(); reasons.size() > recompiles) metrics.recompiled = reasons.back();
  metrics.router = router_metrics(model_, outcome.verdict.action == LossMonitor::Action::Continue);
  scheduler_.step();
  samples_read_ += loaded.samples;
  sampler_position_ = loaded.position;
  metrics.samples_read = samples_read_;
  metrics.parameter_bytes = parameter_bytes_;
  measure(metrics, std::chrono::duration<double>(Clock::now() - start).count());
  end_profile();
  const int64_t every = config_.guard.checksum_every;
  if (every > 0 && step_ % every == 0) check_replicas(model_, c10::str("after step ", step_));
  return outcome;
}

void Trainer::begin_profile() {
  const int64_t at = config_.metrics.output.empty() ? 0 : config_.metrics.profile_step;
  steps_of_run_++;
  if (steps_of_run_ == std::max<int64_t>(at - 1, 1) && at > 0) profiler_ = std::make_unique<debug::StepProfiler>();
  if (steps_of_run_ == at) profiler_->start();
}

// Every rank writes a file. `tessera report` reads them.
void Trainer::end_profile() {
  if (!profiler_ || steps_of_run_ != config_.metrics.profile_step) return;
  auto profile = profiler_->stop();
  profiler_.reset();
  const auto clock = debug::align_clock(world_.group());
  profile.rank = world_.rank();
  profile.step = step_;
  profile.start += clock.offset;
  profile.clock_error = clock.error;
  const auto folder = config_.metrics.output + "/profile";
  comm::gather_decide_broadcast(
      world_.group(), "writing the profile",
      [&] {
        std::filesystem::create_directories(folder);
        write_text_file(c10::str(folder, "/rank-", profile.rank, ".json"), debug::to_json(profile));
        return std::string();
      },
      [](const auto&) { return std::string(); });
}

double Trainer::mean_over_data(const at::Tensor& loss, double* max_loss) {
  auto of_rank = loss.detach().to(at::kDouble);
  model_.sum_over_stages(of_rank);  // ranks without the last stage have 0
  const auto losses = model_.gather_over_data(of_rank).cpu();
  const double mean = losses.mean().item<double>();
  *max_loss = losses.max().item<double>();  // NaN if a loss is NaN
  if (*max_loss < mean) *max_loss = mean;   // rounding of the mean of equal losses
  return mean;
}

void Trainer::measure(StepMetrics& metrics, double seconds) const {
  metrics.seconds = seconds;
  const auto ranks = static_cast<double>(model_.mesh().size());
  const int64_t length = data_.training->length();
  metrics.tokens_per_second = static_cast<double>(config_.training.batch * length) / seconds / ranks;
  metrics.tflops = metrics.tokens_per_second * flops_per_token(model_config(config_.model), length) / 1e12;
  if (peak_tflops_ > 0) metrics.mfu = 100 * metrics.tflops / peak_tflops_;
  metrics.memory_gib = peak_memory_gib(device_);
}

EvalMetrics Trainer::evaluate() {
  // The same rows per forward as in training.
  const int64_t batch = config_.training.batch / config_.training.accumulate;
  auto metrics = train::evaluate(model_, *data_.held_out, config_.eval.samples, batch, device_);
  metrics.step = step_;
  return metrics;
}

std::string Trainer::sample() {
  std::vector<int64_t> tokens;
  for (const char c : data_.held_out->prompt()) tokens.push_back(static_cast<unsigned char>(c));
  const int64_t length = data_.held_out->length(), counted = data_.held_out->counted();
  // If only the answer counts for the loss, generate as many tokens as it has.
  const int64_t generated = counted < length ? counted : config_.eval.sample_tokens;
  // Greedy text repeats itself. An answer is not text: only the most likely one counts.
  double temperature = config_.eval.temperature;
  if (temperature < 0) temperature = eval_kind(*data_.held_out) == EvalKind::Answers ? 0 : 0.8;
  return data_.held_out->show(generate(
      model_, std::move(tokens),
      {.tokens = generated, .context = length, .temperature = temperature, .seed = config_.training.seed}, device_));
}

TrainResult Trainer::run() {
  TrainResult result;
  while (step_ < config_.training.steps) {
    const auto outcome = step();
    for (const auto& sink : sinks_) sink->on_step(outcome.metrics);
    if (const int64_t every = config_.metrics.histograms_every; every > 0 && step_ % every == 0) {
      const auto histograms = histograms_of(model_.module());  // a collective: every rank calls it
      for (const auto& sink : sinks_) sink->on_histograms(step_, histograms);
    }
    if (outcome.verdict.action == LossMonitor::Action::Stop) {
      result.stopped = c10::str("step ", step_, ": ", outcome.verdict.reason);
      break;
    }
    save_if_due();
    const bool last = step_ == config_.training.steps;
    if (last || (config_.eval.every > 0 && step_ % config_.eval.every == 0)) {
      result.eval = evaluate();
      for (const auto& sink : sinks_) sink->on_eval(result.eval);
    }
  }
  saving_.wait();
  report_background_save();
  if (result.stopped.empty() && result.eval.step != step_) {  // the checkpoint already had all steps
    result.eval = evaluate();
    for (const auto& sink : sinks_) sink->on_eval(result.eval);
  }
  result.steps = step_;
  if (result.stopped.empty() && config_.eval.sample_tokens > 0) result.sample = sample();
  return result;
}

}  // namespace tessera::train
