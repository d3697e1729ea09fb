#pragma once
#include "tessera/base/detail/text_file.h"
#include "tessera/train/detail/metrics.h"

#include <string>

namespace tessera::train {

// One line of JSON. NaN and infinity are written as null.
std::string json_line(const StepMetrics& metrics);
std::string json_line(const EvalMetrics& metrics);

// Writes metrics.jsonl: one line per step and per validation, each in one write.
class MetricsFile final : public MetricsSink {
 public:
  // A resumed run keeps the lines up to its step, so that each step is in the file once. 0: a new file.
  // Throws UsageError or SystemError if the file cannot be written.
  explicit MetricsFile(const std::string& path, int64_t resumed_step = 0);
  void on_step(const StepMetrics& metrics) override { file_.append(json_line(metrics) + "\n"); }
  void on_eval(const EvalMetrics& metrics) override;

 private:
  int64_t last_eval_;  // step of the last validation in the file
  AppendedFile file_;
};

// Writes losses.txt: a line "STEP LOSS GRAD_NORM" per step, with the fewest digits that read back exactly. Under
// invariant numerics the file has the same bytes on every mesh.
class LossFile final : public MetricsSink {
 public:
  // As MetricsFile.
  explicit LossFile(const std::string& path, int64_t resumed_step = 0);
  void on_step(const StepMetrics& metrics) override;

 private:
  AppendedFile file_;
};

}  // namespace tessera::train
