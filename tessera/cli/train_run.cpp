#include "tessera/cli/train_run.h"

#include "tessera/base/error.h"
#include "tessera/base/error_file.h"
#include "tessera/base/detail/settings.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/comm/world.h"
#include "tessera/train/detail/console.h"
#include "tessera/train/detail/event_file.h"
#include "tessera/train/detail/metrics_file.h"
#include "tessera/train/trainer.h"

#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <sstream>

namespace tessera::cli {

// It ran, and it is not what was hoped for.
struct TrainingFailed : c10::Error {
  using c10::Error::Error;
};

namespace {

using train::TrainConfig;

[[noreturn]] void fail(const std::string& what) { throw TrainingFailed({__func__, __FILE__, __LINE__}, what); }

std::string millions(int64_t count) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(count < 10'000'000 ? 2 : 0) << static_cast<double>(count) / 1e6 << "M";
  return text.str();
}

std::string per_cent(double share) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << 100 * share << "%";
  return text.str();
}

void introduce(const TrainConfig& config, const World& world) {
  const auto mesh = train::mesh_shape(config, world.size());
  std::cout << "training " << config.model.name << ", "
            << millions(models::parameter_count(train::model_config(config.model))) << " parameters, on "
            << config.data.path << ": " << config.training.steps << " steps of " << config.training.batch << " x "
            << train::sequence_length(config) << " tokens, mesh " << mesh << ", " << config.training.precision
            << (config.training.compile ? ", compiled" : "") << std::endl;
}

void add_sinks(train::Trainer& trainer, const TrainConfig& config) {
  const bool terminal = isatty(STDOUT_FILENO) == 1;
  trainer.add(std::make_shared<train::Console>(std::cout,
                                               train::ConsoleOptions{.steps = config.training.steps,
                                                                     .log_every = config.metrics.log_every,
                                                                     .made = trainer.steps_made(),
                                                                     .colour = terminal && !setting_is_set("NO_COLOR"),
                                                                     .bar = terminal}));
  const auto& folder = config.metrics.output;
  trainer.add(std::make_shared<train::MetricsFile>(folder + "/metrics.jsonl", trainer.steps_made() > 0));
  if (config.metrics.tensorboard)
    trainer.add(std::make_shared<train::EventFile>(folder + "/tb", config.metrics.log_every));
}

void conclude(const TrainConfig& config, const train::TrainResult& result) {
  const auto& folder = config.metrics.output;
  if (!result.sample.empty()) {
    std::ofstream(folder + "/sample.txt") << result.sample << '\n';
    std::cout << "sample: " << result.sample << '\n';
  }
  std::cout << "outputs: " << folder << "/ (config.toml, metrics.jsonl" << (config.metrics.tensorboard ? ", tb/" : "")
            << (config.checkpoint.every > 0 && config.checkpoint.folder.empty() ? ", checkpoints/" : "") << ")"
            << std::endl;
}

// Ctrl-C where no launcher takes it: one line, at once, whatever the step is doing. Only what a handler may do.
char interrupted_line[512];
void on_interrupt(int) {
  (void)!write(STDERR_FILENO, interrupted_line, std::strlen(interrupted_line));
  _exit(128 + SIGINT);
}
void end_on_interrupt(const TrainConfig& config) {
  std::snprintf(interrupted_line, sizeof interrupted_line,
                "\ntessera train: interrupted; what was written so far is in %s/\n", config.metrics.output.c_str());
  if (std::signal(SIGINT, on_interrupt) == SIG_IGN) std::signal(SIGINT, SIG_IGN);  // as nohup and shells want it
}

}  // namespace

std::string new_output_folder(const TrainConfig& config) {
  const auto now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::ostringstream name;
  name << "outputs/" << std::put_time(&local, "%Y%m%d-%H%M%S") << "-" << config.model.name;
  return name.str();
}

void prepare_output(const TrainConfig& config) {
  const auto& folder = config.metrics.output;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  TESSERA_CHECK(!error, UsageError, "cannot make the output folder '", folder, "': ", error.message());
  std::ofstream file(folder + "/config.toml");
  file << config << std::flush;
  TESSERA_CHECK(file, UsageError, "cannot write into the output folder '", folder, "': ", std::strerror(errno));
}

void run_training(const TrainConfig& given) {
  auto config = given;
  const auto world = init();
  const bool speaks = world.rank() == 0;
  if (config.metrics.output.empty())  // started by another launcher: nobody has named one for all
    config.metrics.output = comm::decide(
        world.group(), "the output folder", [] { return std::string(); },
        [&](const auto&) { return new_output_folder(config); });
  if (speaks) prepare_output(config);
  if (world.size() == 1) end_on_interrupt(config);
  train::TrainResult result;
  {
    if (speaks) introduce(config, world);
    train::Trainer trainer(config, world);
    if (speaks && !trainer.resumed_from().empty())
      std::cout << "going on from " << trainer.resumed_from() << ", after step " << trainer.steps_made() << std::endl;
    if (speaks) add_sinks(trainer, config);
    result = trainer.run();
  }
  if (speaks) conclude(config, result);
  destroy();
  if (!result.stopped.empty()) fail("stopped at " + result.stopped);
  const auto asked = config.eval.accuracy;
  if (asked > 0 && result.eval.accuracy < asked)
    fail("it did not learn: " + per_cent(result.eval.accuracy) + " of the held-out answers are right, and " +
         per_cent(asked) + " were asked for");
  if (speaks && asked > 0)
    std::cout << "learned: " << per_cent(result.eval.accuracy) << " of " << result.eval.samples
              << " held-out answers are right, none of which were trained on (asked for: " << per_cent(asked) << ")"
              << std::endl;
}

void end_with(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  const bool usage = dynamic_cast<const UsageError*>(ours) || dynamic_cast<const ShardingError*>(ours);
  const bool bug = dynamic_cast<const InternalError*>(ours);
  if (setting_is_set("TORCHELASTIC_ERROR_FILE"))
    record_error(error);
  else
    std::cerr << "tessera train: " << (bug ? "this is a bug of ours: " : "")
              << (ours ? ours->what_without_backtrace() : error.what()) << std::endl;
  std::cout.flush();
  std::_Exit(usage ? 2 : bug ? 70 : 1);
}

}  // namespace tessera::cli
