#include "tessera/train/trainer.h"

#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/debug/detail/step_profiler.h"
#include "tessera/dtensor/detail/full_tensor_or_self.h"
#include "tessera/train/detail/check_replicas.h"
#include "tessera/train/detail/device.h"
#include "tessera/train/detail/memory_check.h"
#include "tessera/train/detail/router.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <deque>
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

PeakRate configured_peak_rate(const TrainConfig& config, at::Device device) {
  if (config.metrics.peak_tflops > 0) return {config.metrics.peak_tflops, "metrics.peak_tflops"};
  return peak_rate(device, config.training.precision);
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
      peak_(configured_peak_rate(config, device_)) {
  if (config.guard.checksum_every > 0) check_replicas(model_, "before the first step");
  if (const auto path = agree_on_checkpoint(config, world); !path.empty()) resume(path);
}

Trainer::~Trainer() = default;

Trainer::StepOutcome Trainer::step() {
  const auto start = Clock::now();
  auto started = start_step(false);
  measure(started.outcome.metrics, std::chrono::duration<double>(Clock::now() - start).count());
  return started.outcome;
}

// On a GPU the host reads loss and norm of a step later, so that it never waits for the device. Until then the device
// itself keeps a bad step from changing parameters. A comparison with earlier losses, and routers, need the host.
bool Trainer::can_read_later() const {
  return !device_.is_cpu() && config_.guard.spike == 0 && !model_.has_stages() && model_.experts().empty();
}

Trainer::StartedStep Trainer::start_step(bool may_read_later) {
  begin_profile();
  const auto loaded = loader_.next();
  StartedStep started;
  auto& [metrics, verdict] = started.outcome;
  metrics.step = ++step_;
  metrics.lr = optimizer_->lr(0);
  metrics.data_seconds = loader_.seconds_waited();
  const auto recompiles = train_step_.recompiles().size();
  at::Tensor numbers;
  {
    const TrafficCount traffic;
    const auto result =
        train_step_.forward_backward(to_device(loaded.batch.input), to_device(loaded.batch.target), loaded.counted);
    saving_.wait_staging();  // forward and backward change nothing that a checkpoint has
    metrics.traffic = traffic.by_axis();
    numbers = step_numbers(result);
  }
  if (may_read_later) {
    started.numbers = at::empty_like(numbers, numbers.options().device(at::kCPU).pinned_memory(true));
    started.numbers.copy_(numbers, /*non_blocking=*/true);
    const c10::impl::VirtualGuardImpl device(device_.type());
    started.read.emplace(device_.type());
    started.read->record(device.getStream(device_));
    train_step_.update(config_.guard.on_nan == "ignore" ? at::Tensor() : is_bad(numbers));
  } else {
    take_numbers(started.outcome, numbers.cpu());
    if (verdict.action == LossMonitor::Action::Continue)
      train_step_.update();
    else
      train_step_.skip();
  }
  if (const auto reasons = train_step_.recompiles(); reasons.size() > recompiles) metrics.recompiled = reasons.back();
  metrics.router = router_metrics(model_, verdict.action == LossMonitor::Action::Continue);
  scheduler_.step();
  samples_read_ += loaded.samples;
  sampler_position_ = loaded.position;
  metrics.samples_read = samples_read_;
  metrics.parameter_bytes = parameter_bytes_;
  end_profile();
  const int64_t every = config_.guard.checksum_every;
  if (every > 0 && step_ % every == 0) check_replicas(model_, c10::str("after step ", step_));
  return started;
}

// 1 if the step must not change parameters. A step that stops the run keeps all later ones from it too.
at::Tensor Trainer::is_bad(const at::Tensor& numbers) {
  auto bad = numbers.isfinite().all().logical_not().to(at::kFloat).view({1});
  if (config_.guard.on_nan != "stop") return bad;
  return stopped_ = stopped_.defined() ? at::maximum(stopped_, bad) : bad;
}

at::Tensor Trainer::to_device(const at::Tensor& batch) const {
  if (device_.is_cpu()) return batch;
  return batch.pin_memory().to(device_, /*non_blocking=*/true);  // a copy from other memory waits
}

void Trainer::finish(StartedStep& started) {
  if (!started.read) return;
  if (!started.read->query()) started.read->synchronize();
  started.read.reset();
  take_numbers(started.outcome, started.numbers);
}

void Trainer::take_numbers(StepOutcome& outcome, const at::Tensor& numbers) {
  auto& metrics = outcome.metrics;
  const auto* values = numbers.const_data_ptr<double>();
  metrics.loss = values[0];
  metrics.max_loss = values[1];                                          // NaN if a loss is NaN
  if (metrics.max_loss < metrics.loss) metrics.max_loss = metrics.loss;  // rounding of the mean of equal losses
  metrics.grad_norm = values[2];
  outcome.verdict = loss_monitor_.check(metrics.loss, metrics.grad_norm, config_.training.precision == "fp16");
  if (outcome.verdict.action != LossMonitor::Action::Continue) metrics.skipped = outcome.verdict.reason;
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

// Mean and largest loss over the data, and the gradient norm, in one tensor.
at::Tensor Trainer::step_numbers(const StepResult& result) {
  const at::NoGradGuard no_grad;
  auto of_rank = result.loss.detach().to(at::kDouble);
  model_.sum_over_stages(of_rank);  // ranks without the last stage have 0
  const auto losses = model_.gather_over_data(of_rank);
  const auto norm = tessera::detail::full_tensor_or_self(result.grad_norm).to(losses.device(), at::kDouble);
  return at::stack({losses.mean(), losses.max(), norm});
}

void Trainer::measure(StepMetrics& metrics, double seconds) const {
  metrics.seconds = seconds;
  const auto ranks = static_cast<double>(model_.mesh().size());
  const int64_t length = data_.training->length();
  metrics.tokens_per_second = static_cast<double>(config_.training.batch * length) / seconds / ranks;
  metrics.tflops = metrics.tokens_per_second * flops_per_token(model_config(config_.model), length) / 1e12;
  metrics.peak_tflops = peak_.tflops;
  if (peak_.tflops > 0) metrics.mfu = 100 * metrics.tflops / peak_.tflops;
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

// Must the numbers of all steps so far be read after this step, because it is logged, saved or evaluated?
bool Trainer::must_read(int64_t step) const {
  const auto& c = config_;
  const auto is_due = [step](int64_t every) { return every > 0 && step % every == 0; };
  return steps_of_run_ == 1 || step == c.training.steps || is_due(c.metrics.log_every) || is_due(c.eval.every) ||
         is_due(c.checkpoint.every) || is_due(c.metrics.histograms_every);
}

TrainResult Trainer::run() {
  constexpr size_t kMostUnread = 64;
  TrainResult result;
  std::deque<StartedStep> unread;
  while (step_ < config_.training.steps) {
    const auto start = Clock::now();
    unread.push_back(start_step(can_read_later()));
    const bool read_all = must_read(step_) || unread.size() == kMostUnread;
    for (auto& each : unread)
      if (read_all) finish(each);
    measure(unread.back().outcome.metrics, std::chrono::duration<double>(Clock::now() - start).count());
    while (!unread.empty() && result.stopped.empty() && (!unread[0].read || unread[0].read->query())) {
      finish(unread[0]);
      const auto [metrics, verdict] = unread[0].outcome;
      unread.pop_front();
      for (const auto& sink : sinks_) sink->on_step(metrics);
      if (verdict.action == LossMonitor::Action::Stop)
        result.stopped = c10::str("step ", metrics.step, ": ", verdict.reason);
    }
    if (!result.stopped.empty()) break;
    if (const int64_t every = config_.metrics.histograms_every; every > 0 && step_ % every == 0) {
      const auto histograms = histograms_of(model_.module());  // a collective: every rank calls it
      for (const auto& sink : sinks_) sink->on_histograms(step_, histograms);
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
