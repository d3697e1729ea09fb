#pragma once
#include "tessera/train/detail/metrics.h"

#include <fstream>
#include <string>

namespace tessera::train {

// One line of JSON. Numbers that JSON has not (nan, inf) are null.
std::string json_line(const StepMetrics& metrics);
std::string json_line(const EvalMetrics& metrics);

// metrics.jsonl: a line for every step and every evaluation, there as soon as the step is done.
class MetricsFile final : public MetricsSink {
 public:
  // `append`: behind the lines that are there, of a training that is gone on with.
  explicit MetricsFile(const std::string& path, bool append = false);  // UsageError if it cannot be written
  void on_step(const StepMetrics& metrics) override { write(json_line(metrics)); }
  void on_eval(const EvalMetrics& metrics) override { write(json_line(metrics)); }

 private:
  void write(const std::string& line);

  std::string path_;
  std::ofstream file_;
};

}  // namespace tessera::train
