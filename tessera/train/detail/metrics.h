#pragma once
#include "tessera/comm/detail/records.h"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::train {

struct Traffic {
  int64_t collectives = 0, bytes = 0;
  bool operator==(const Traffic&) const = default;
};

// Counts the collectives that this thread posts while alive, by the name of their group: a mesh axis.
class TrafficCount final : private comm::Observer {
 public:
  TrafficCount() : scope_(this) {}
  const std::map<std::string, Traffic>& by_axis() const { return by_axis_; }

 private:
  void on_post(const comm::Record& record) override {
    if (!record.counted()) return;
    auto& traffic = by_axis_[record.group];
    traffic.collectives++;
    traffic.bytes += record.bytes;
  }
  std::map<std::string, Traffic> by_axis_;
  comm::ObserverScope scope_;
};

// One step, as it is written down. The same on all ranks unless said otherwise.
struct StepMetrics {
  int64_t step = 0;     // from 1
  double loss = 0;      // mean over the targets of the global batch
  double max_loss = 0;  // of the data-parallel ranks' own means
  double grad_norm = 0, lr = 0;
  double seconds = 0, data_seconds = 0;         // of this rank
  double tokens_per_second = 0;                 // for each rank: those of all, shared out
  double tflops = 0;                            // of a rank
  std::optional<double> mfu = {};               // per cent of the peak
  double memory_gib = 0;                        // the most this rank's process has held
  int64_t samples_read = 0;                     // since the start, over all ranks
  std::vector<int64_t> parameter_bytes = {};    // of each rank
  std::map<std::string, Traffic> traffic = {};  // of this rank's step, by axis
  std::string skipped = {};                     // why there was no update; empty: there was
};

struct EvalMetrics {
  int64_t step = 0;
  double loss = 0;
  double accuracy = 0;  // share of samples whose counted targets were all foretold
  int64_t samples = 0;
};

// Where metrics go.
class MetricsSink {
 public:
  virtual ~MetricsSink() = default;
  virtual void on_step(const StepMetrics&) {}  // every step
  virtual void on_eval(const EvalMetrics&) {}
  virtual void on_checkpoint(const std::string& /*path*/) {}  // it is complete
};

}  // namespace tessera::train
