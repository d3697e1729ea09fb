#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/train/detail/histogram.h"

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <numbers>
#include <optional>
#include <string>
#include <vector>

namespace tessera::train {

// Collectives and the bytes that this rank passes to them.
struct Traffic {
  int64_t collectives = 0, bytes = 0;
  bool operator==(const Traffic&) const = default;
};

// Counts the collectives and the sends that this thread starts while alive, by process group, which has the name of a
// mesh axis.
class TrafficCount final : private comm::Observer {
 public:
  TrafficCount() : scope_(this) {}
  const std::map<std::string, Traffic>& by_axis() const { return by_axis_; }

 private:
  void on_post(const comm::Record& record) override {
    if (!record.counted() && record.kind != comm::CommKind::Send) return;
    auto& traffic = by_axis_[record.group];
    traffic.collectives++;
    traffic.bytes += record.bytes;
  }
  std::map<std::string, Traffic> by_axis_;
  comm::ObserverScope scope_;
};

// What the routers of a mixture of experts did in one step.
struct RouterMetrics {
  double aux_loss = 0;  // mean over layers and microbatches; 1 if the experts are balanced
  double dropped = 0;   // fraction of the choices of experts above their capacity
  double max_load = 0;  // tokens of the busiest expert of a layer / mean of the layer's experts; 1 if balanced
  bool operator==(const RouterMetrics&) const = default;
};

// Metrics of one step. Equal on all ranks unless a comment says otherwise.
struct StepMetrics {
  int64_t step = 0;     // from 1
  double loss = 0;      // mean over the targets of the global batch
  double max_loss = 0;  // largest loss of a data-parallel rank; `loss` is their mean
  double grad_norm = 0, lr = 0;
  double seconds = 0, data_seconds = 0;         // of this rank
  double tokens_per_second = 0;                 // global tokens per second / ranks
  double tflops = 0;                            // per rank
  std::optional<double> mfu = {};               // in percent of the peak
  double peak_tflops = 0;                       // of this rank's device (Trainer::peak_rate)
  double memory_gib = 0;                        // peak of this rank
  int64_t samples_read = 0;                     // since the start, over all ranks
  std::vector<int64_t> parameter_bytes = {};    // per rank
  std::map<std::string, Traffic> traffic = {};  // of this rank in this step, by mesh axis
  std::optional<RouterMetrics> router = {};     // with experts
  std::string recompiled = {};                  // why the step was compiled again; empty: it was not
  std::string skipped = {};                     // why the update was skipped; empty: it was not
};

// What a validation measures besides the loss.
enum class EvalKind : uint8_t {
  Answers,  // exact-match accuracy: each sample has a question and an answer
  Tokens,   // perplexity: all tokens are targets
  Bytes,    // perplexity and bits per byte: the tokens are bytes of text
};

// Metrics of one validation.
struct EvalMetrics {
  int64_t step = 0;
  double loss = 0;      // mean over the targets, in nats
  double accuracy = 0;  // fraction of samples whose counted targets were all predicted
  int64_t samples = 0;
  EvalKind kind = EvalKind::Answers;

  double perplexity() const { return std::exp(loss); }
  double bits_per_byte() const { return loss / std::numbers::ln2; }  // of EvalKind::Bytes
};

// A destination of metrics, such as a file or the console.
class MetricsSink {
 public:
  virtual ~MetricsSink() = default;
  virtual void on_step(const StepMetrics&) {}  // every step
  virtual void on_eval(const EvalMetrics&) {}
  virtual void on_histograms(int64_t /*step*/, const NamedHistograms&) {}  // of weights and gradients
  virtual void on_checkpoint(const std::string& /*path*/) {}               // after it is complete
};

}  // namespace tessera::train
