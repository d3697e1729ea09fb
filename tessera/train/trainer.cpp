#include "tessera/train/trainer.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/train/detail/checksum.h"
#include "tessera/train/detail/device.h"

#include <ATen/ops/zeros.h>

#include <chrono>

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

const TrainConfig& checked(const TrainConfig& config, const World& world) {
  check(config, world.size());
  TESSERA_CHECK(config.checkpoint.every == 0 || !checkpoint_folder(config).empty(), UsageError, "checkpoint.every is ",
                config.checkpoint.every,
                ", and there is no folder for checkpoints: set checkpoint.folder or metrics.output");
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

// All ranks take the one that the first sees.
std::string agreed_checkpoint(const TrainConfig& config, const World& world) {
  if (config.checkpoint.resume.empty()) return "";
  return comm::decide(
      world.group(), "resuming", [] { return std::string(); }, [&](const auto&) { return find_checkpoint(config); });
}

std::vector<int64_t> gather_number(const World& world, int64_t number) {
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
      layout_(config, make_mesh(config, world)),
      optimizer_(make_optimizer(config.optimizer, layout_.module())),
      schedule_(*optimizer_, learning_rate_factor(config.optimizer, config.training.steps)),
      step_function_(config, layout_, *optimizer_),
      loader_(data_.training, sampler_options(config, *data_.training), layout_.data_rank(), layout_.data_ranks(),
              static_cast<size_t>(config.data.prefetch)),
      sentinel_(config.guard),
      parameter_bytes_(gather_number(world, layout_.parameter_bytes())),
      peak_tflops_(peak_tflops(config, device_)) {
  if (config.guard.checksum_every > 0) check_replicas(layout_.module(), layout_.mesh(), "before the first step");
  if (const auto path = agreed_checkpoint(config, world); !path.empty()) resume(path);
}

Trainer::StepOutcome Trainer::step() {
  const auto start = Clock::now();
  const auto loaded = loader_.next();
  StepOutcome outcome;
  auto& metrics = outcome.metrics;
  metrics.step = ++step_;
  metrics.lr = optimizer_->lr(0);
  metrics.data_seconds = loader_.seconds_waited();
  {
    const TrafficCount traffic;
    const auto result = step_function_.forward_backward(loaded.batch.input.to(device_), loaded.batch.target.to(device_),
                                                        loaded.counted);
    metrics.grad_norm = result.grad_norm.item<double>();
    metrics.traffic = traffic.by_axis();
    metrics.loss = mean_over_data(result.loss, &metrics.max_loss);
  }
  outcome.verdict = sentinel_.look(metrics.loss, metrics.grad_norm, config_.training.precision == "fp16");
  if (outcome.verdict.action == Sentinel::Action::Go) {
    step_function_.update();
  } else {
    step_function_.skip();
    metrics.skipped = outcome.verdict.reason;
  }
  schedule_.step();
  samples_read_ += loaded.samples;
  position_ = loaded.position;
  metrics.samples_read = samples_read_;
  metrics.parameter_bytes = parameter_bytes_;
  measure(metrics, std::chrono::duration<double>(Clock::now() - start).count());
  const int64_t every = config_.guard.checksum_every;
  if (every > 0 && step_ % every == 0) check_replicas(layout_.module(), layout_.mesh(), c10::str("after step ", step_));
  return outcome;
}

// One collective for each data axis, two where the greatest is wanted: at the steps that are shown.
double Trainer::mean_over_data(const at::Tensor& loss, double* greatest) {
  auto sum = loss.detach().to(at::kDouble).view({1}).clone(), max = sum.clone();
  layout_.sum_over_data(sum);
  if (step_ == 1 || step_ % config_.metrics.log_every == 0) layout_.max_over_data(max);
  *greatest = max.item<double>();
  return sum.item<double>() / static_cast<double>(layout_.data_ranks());
}

void Trainer::measure(StepMetrics& metrics, double seconds) const {
  metrics.seconds = seconds;
  const auto ranks = static_cast<double>(layout_.mesh().size());
  const int64_t length = data_.training->length();
  metrics.tokens_per_second = static_cast<double>(config_.training.batch * length) / seconds / ranks;
  metrics.tflops = metrics.tokens_per_second * flops_per_token(model_config(config_.model), length) / 1e12;
  if (peak_tflops_ > 0) metrics.mfu = 100 * metrics.tflops / peak_tflops_;
  metrics.memory_gib = peak_memory_gib(device_);
}

EvalMetrics Trainer::evaluate() {
  // As many rows at a time as a rank computes in training.
  const int64_t batch = config_.training.batch / config_.training.accumulate;
  auto metrics = train::evaluate(layout_, *data_.held_out, config_.eval.samples, batch, device_);
  metrics.step = step_;
  return metrics;
}

std::string Trainer::sample() {
  std::vector<int64_t> tokens;
  for (const char c : data_.held_out->prompt()) tokens.push_back(static_cast<unsigned char>(c));
  const int64_t length = data_.held_out->length(), counted = data_.held_out->counted();
  // Where only an answer counts, the text is as long as that is.
  const int64_t count = counted < length ? counted : config_.eval.sample_tokens;
  return data_.held_out->show(generate(
      layout_, std::move(tokens),
      {.count = count, .longest = length, .temperature = config_.eval.temperature, .seed = config_.training.seed},
      device_));
}

TrainResult Trainer::run() {
  TrainResult result;
  while (step_ < config_.training.steps) {
    const auto outcome = step();
    for (const auto& sink : sinks_) sink->on_step(outcome.metrics);
    if (outcome.verdict.action == Sentinel::Action::Stop) {
      result.stopped = c10::str("step ", step_, ": ", outcome.verdict.reason);
      break;
    }
    save_when_due();
    const bool last = step_ == config_.training.steps;
    if (last || (config_.eval.every > 0 && step_ % config_.eval.every == 0)) {
      result.eval = evaluate();
      for (const auto& sink : sinks_) sink->on_eval(result.eval);
    }
  }
  if (result.stopped.empty() && result.eval.step != step_) {  // it had made all steps before
    result.eval = evaluate();
    for (const auto& sink : sinks_) sink->on_eval(result.eval);
  }
  result.steps = step_;
  if (result.stopped.empty() && config_.eval.sample_tokens > 0) result.sample = sample();
  return result;
}

}  // namespace tessera::train
