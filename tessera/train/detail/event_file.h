#pragma once
#include "tessera/base/detail/text_file.h"
#include "tessera/train/detail/histogram.h"
#include "tessera/train/detail/metrics.h"

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// TensorBoard event files, written without its library because the format is small: TFRecord records, each a protobuf
// message tensorflow.Event.
//
//   record    length u64 | masked crc32c of it u32 | data | masked crc32c of data u32       little-endian
//   Event     1: wall_time double   2: step varint   3: file_version string   5: summary { 1: { 1: tag  2: float } }
//             7: session_log { 1: status, START is 1 }
//   histogram summary { 1: { 1: tag  5: { doubles 1: min 2: max 3: num 4: sum 5: sum_squares  packed 6: bucket_limit
//             7: bucket } } }
namespace tessera::train {

using Scalars = std::vector<std::pair<std::string, float>>;

namespace detail {
std::string tf_record(std::string_view data);  // data with TFRecord framing
std::string version_event(double wall_time);   // the first record of a file
std::string scalar_event(double wall_time, int64_t step, const Scalars& scalars);
std::string histogram_event(double wall_time, int64_t step, const NamedHistograms& histograms);
// TensorBoard drops the values of earlier files from this step on.
std::string restart_event(double wall_time, int64_t step);
}  // namespace detail

// Writes every `log_every`th step, with the tags of torchtitan.
class EventFile final : public MetricsSink {
 public:
  // Creates <folder>/events.out.tfevents.<seconds>.<host>.<pid>. Throws UsageError or SystemError if it cannot be
  // written. `resumed_step`: of a resumed run, whose later steps replace those of an earlier file; 0: a new run.
  EventFile(const std::string& folder, int64_t log_every, int64_t resumed_step = 0);
  void on_step(const StepMetrics& metrics) override;
  void on_eval(const EvalMetrics& metrics) override;
  void on_histograms(int64_t step, const NamedHistograms& histograms) override;
  void write_scalars(int64_t step, const Scalars& scalars);
  const std::string& path() const { return file_->path(); }

 private:
  void write(const std::string& event);

  int64_t log_every_;
  std::unique_ptr<AppendedFile> file_;
};

}  // namespace tessera::train
