#pragma once
#include "tessera/train/detail/metrics.h"

#include <chrono>
#include <iosfwd>
#include <string>

namespace tessera::train {

// step: 10  loss:  8.12345  grad_norm:  1.2345  memory: 0.41GiB  tps: 6,667  tflops: 0.12  mfu: 39.04%
// in the format of torchtitan; without mfu if the peak is unknown.
std::string step_line(const StepMetrics& metrics, bool colour = false);
std::string eval_line(const EvalMetrics& metrics, bool colour = false);

struct ConsoleOptions {
  int64_t steps = 0, log_every = 10;
  int64_t steps_made = 0;  // before this run, if resumed
  bool colour = false;
  int terminal = -1;  // file descriptor of a terminal, for a progress bar; -1: none
};

// Prints a line for the first step and then every log_every steps, with the throughput since the last line. On a
// terminal, also a progress bar with the remaining time.
class Console final : public MetricsSink {
 public:
  Console(std::ostream& out, const ConsoleOptions& options);
  ~Console() override;
  void on_step(const StepMetrics& metrics) override;
  void on_eval(const EvalMetrics& metrics) override;
  void on_checkpoint(const std::string& path) override;

 private:
  void line(const std::string& text);
  void draw_bar(int64_t step);

  std::ostream& out_;
  ConsoleOptions options_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  double tokens_ = 0, seconds_ = 0;  // since the last line, of one rank
  bool bar_shown_ = false;
};

}  // namespace tessera::train
