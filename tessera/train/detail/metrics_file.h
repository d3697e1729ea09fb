#pragma once
#include "tessera/train/detail/metrics.h"

#include <fstream>
#include <string>

namespace tessera::train {

// One line of JSON. NaN and infinity are written as null.
std::string json_line(const StepMetrics& metrics);
std::string json_line(const EvalMetrics& metrics);

// Writes metrics.jsonl: one line per step and per validation, flushed after each.
class MetricsFile final : public MetricsSink {
 public:
  // `append`: keeps existing lines, for a resumed run. Throws UsageError if the file cannot be written.
  explicit MetricsFile(const std::string& path, bool append = false);
  void on_step(const StepMetrics& metrics) override { write(json_line(metrics)); }
  void on_eval(const EvalMetrics& metrics) override { write(json_line(metrics)); }

 private:
  void write(const std::string& line);

  std::string path_;
  std::ofstream file_;
};

}  // namespace tessera::train
