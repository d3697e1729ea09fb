#include "tessera/cli/train_run.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/base/error_file.h"
#include "tessera/cli/exit_code.h"
#include "tessera/cli/report.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/comm/world.h"
#include "tessera/train/detail/console.h"
#include "tessera/train/detail/device.h"
#include "tessera/train/detail/drift.h"
#include "tessera/train/detail/event_file.h"
#include "tessera/train/detail/metrics_file.h"
#include "tessera/train/detail/output_folder.h"
#include "tessera/train/trainer.h"

#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <optional>
#include <sstream>

namespace tessera::cli {

// Training ran, but it stopped early or did not reach the required accuracy.
struct TrainingFailed : c10::Error {
  using c10::Error::Error;
};

namespace {

using train::TrainConfig;

[[noreturn]] void training_failed(const std::string& why) { throw TrainingFailed({__func__, __FILE__, __LINE__}, why); }

std::string millions(int64_t count) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(count < 10'000'000 ? 2 : 0) << static_cast<double>(count) / 1e6 << "M";
  return text.str();
}

std::string percent(double fraction) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << 100 * fraction << "%";
  return text.str();
}

void print_header(const TrainConfig& config, const World& world) {
  const auto mesh = train::mesh_shape(config, world.size());
  std::cout << "training " << config.model.name << ", "
            << millions(models::parameter_count(train::model_config(config.model))) << " parameters, on "
            << config.data.path << ": " << config.training.steps << " steps of " << config.training.batch << " x "
            << train::sequence_length(config) << " tokens, mesh " << mesh << ", " << config.training.precision
            << (config.training.compile ? ", compiled" : "") << std::endl;
}

void print_peak_rate(const train::PeakRate& peak) {
  if (peak.tflops > 0)
    std::cout << "mfu: of " << std::setprecision(3) << peak.tflops << std::setprecision(6) << " TFLOP/s, "
              << peak.source << ", with the FLOPs that llm.c counts" << std::endl;
}

void print_resumed(const train::Trainer& trainer) {
  std::cout << "resumed from " << trainer.resumed_from() << " at step " << trainer.steps_made() << '\n';
  for (const auto& change : trainer.resume_changes()) std::cout << "changed: " << change << '\n';
  std::cout << std::flush;
}

void add_sinks(train::Trainer& trainer, const TrainConfig& config) {
  const bool terminal = isatty(STDOUT_FILENO) == 1;
  trainer.add(std::make_shared<train::Console>(std::cout,
                                               train::ConsoleOptions{.steps = config.training.steps,
                                                                     .log_every = config.metrics.log_every,
                                                                     .steps_made = trainer.steps_made(),
                                                                     .colour = terminal && !setting_is_set("NO_COLOR"),
                                                                     .terminal = terminal ? STDOUT_FILENO : -1}));
  const auto& folder = config.metrics.output;
  trainer.add(std::make_shared<train::MetricsFile>(folder + "/metrics.jsonl", trainer.steps_made()));
  if (config.training.numerics == "invariant")
    trainer.add(std::make_shared<train::LossFile>(folder + "/losses.txt", trainer.steps_made()));
  if (config.metrics.tensorboard)
    trainer.add(std::make_shared<train::EventFile>(folder + "/tb", config.metrics.log_every, trainer.steps_made()));
}

// Without control characters, which a terminal would obey. A model of bytes can generate any of them.
std::string printable(const std::string& text) {
  std::string shown;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool control = (byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7f;
    shown += control ? '?' : c;
  }
  return shown;
}

void print_outputs(const TrainConfig& config, const train::TrainResult& result) {
  const auto& folder = config.metrics.output;
  if (!result.sample.empty()) {
    write_text_file(folder + "/sample.txt", result.sample + "\n");
    std::cout << "sample: " << printable(result.sample) << '\n';
  }
  std::cout << "outputs: " << folder << "/ (report.html, config.toml, metrics.jsonl"
            << (config.training.numerics == "invariant" ? ", losses.txt" : "")
            << (config.metrics.tensorboard ? ", tb/" : "")
            << (config.checkpoint.every > 0 && config.checkpoint.folder.empty() ? ", checkpoints/" : "") << ")"
            << std::endl;
}

// A run that trained does not fail because its report cannot be written.
void report_run(const std::string& folder, int64_t ranks, const std::string& stopped) {
  try {
    write_run_file(folder, ranks, stopped.empty() ? RunState::Completed : RunState::Stopped, stopped);
    write_report(folder);
  } catch (const std::exception& error) {
    std::cerr << "tessera train: no report: " << error_text(error) << std::endl;
  }
}

// Handles Ctrl-C without a launcher: prints one line and exits at once. Async-signal-safe.
char interrupted_line[512];
void on_interrupt(int) {
  (void)!write(STDERR_FILENO, interrupted_line, std::strlen(interrupted_line));
  _exit(128 + SIGINT);
}
void exit_on_interrupt(const TrainConfig& config) {
  std::snprintf(interrupted_line, sizeof interrupted_line, "\ntessera train: interrupted; outputs so far are in %s/\n",
                config.metrics.output.c_str());
  // Keep an ignored SIGINT ignored, as nohup and shells expect.
  if (std::signal(SIGINT, on_interrupt) == SIG_IGN) std::signal(SIGINT, SIG_IGN);
}

}  // namespace

void run_training(const TrainConfig& given, bool overwrite) {
  auto config = given;
  const auto world = init();
  const bool is_rank_0 = world.rank() == 0;
  std::optional<train::OutputFolder> output;  // of rank 0
  config.metrics.output = comm::gather_decide_broadcast(
      world.group(), "the output folder", [] { return std::string(); },
      [&](const auto&) { return output.emplace(config, overwrite).path(); });
  const int64_t ranks = world.size();
  if (ranks == 1) exit_on_interrupt(config);
  if (is_rank_0) write_run_file(config.metrics.output, ranks, RunState::Running);
  train::TrainResult result;
  {
    if (is_rank_0) print_header(config, world);
    if (config.metrics.compare_numerics > 0) {
      const auto drift = train::measure_drift(config, world, config.metrics.compare_numerics);
      if (is_rank_0) std::cout << drift << std::flush;
    }
    train::Trainer trainer(config, world);
    if (is_rank_0) print_peak_rate(trainer.peak_rate());
    if (is_rank_0 && !trainer.resumed_from().empty())
      print_resumed(trainer);
    else if (is_rank_0 && config.checkpoint.resume == "auto")
      std::cout << "no checkpoint in " << train::checkpoint_folder(config) << "; starting at step 0" << std::endl;
    if (is_rank_0) add_sinks(trainer, config);
    result = trainer.run();
  }
  if (is_rank_0) print_outputs(config, result);
  destroy();
  if (is_rank_0) report_run(config.metrics.output, ranks, result.stopped);
  if (!result.stopped.empty()) training_failed("stopped at " + result.stopped);
  const auto required = config.eval.accuracy;
  if (required > 0 && result.eval.accuracy < required)
    training_failed("the validation accuracy is " + percent(result.eval.accuracy) + ", below the required " +
                    percent(required) + " (--accuracy)");
  if (is_rank_0 && required > 0)
    std::cout << "accuracy: " << percent(result.eval.accuracy) << " of " << result.eval.samples
              << " validation answers are correct (required: " << percent(required) << ")" << std::endl;
}

void exit_with_error(const std::exception& error) {
  if (setting_is_set("TORCHELASTIC_ERROR_FILE"))
    record_error(error);
  else
    std::cerr << "tessera train: " << error_text(error) << std::endl;
  std::cout.flush();
  std::_Exit(static_cast<int>(exit_code_of(error)));
}

}  // namespace tessera::cli
