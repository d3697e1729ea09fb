#include "tessera/train/detail/event_file.h"

#include "tessera/base/detail/crc32c.h"
#include "tessera/base/detail/system_error.h"

#include <unistd.h>

#include <bit>
#include <chrono>
#include <cstring>
#include <filesystem>

namespace tessera::train {
namespace detail {
namespace {

// TFRecord masks checksums, because the data may contain checksums itself.
uint32_t masked_crc(std::string_view bytes) {
  const uint32_t crc = crc32c(bytes);
  return std::rotr(crc, 15) + 0xa282ead8u;
}

template <class T>
std::string bytes_of(T value) {  // little-endian
  static_assert(std::endian::native == std::endian::little);
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 128; value >>= 7) bytes += static_cast<char>((value & 127) | 128);
  return bytes + static_cast<char>(value);
}

enum class Wire : uint8_t { Varint = 0, Fixed64 = 1, Bytes = 2, Fixed32 = 5 };
std::string key(uint64_t field, Wire wire) { return varint(field << 3 | static_cast<uint64_t>(wire)); }
std::string field(uint64_t number, std::string_view bytes) {
  return key(number, Wire::Bytes) + varint(bytes.size()) + std::string(bytes);
}
std::string field(uint64_t number, double value) { return key(number, Wire::Fixed64) + bytes_of(value); }
std::string field(uint64_t number, float value) { return key(number, Wire::Fixed32) + bytes_of(value); }
std::string field(uint64_t number, int64_t value) {
  return key(number, Wire::Varint) + varint(static_cast<uint64_t>(value));
}

}  // namespace

std::string tf_record(std::string_view data) {
  const auto length = bytes_of(static_cast<uint64_t>(data.size()));
  return length + bytes_of(masked_crc(length)) + std::string(data) + bytes_of(masked_crc(data));
}

std::string version_event(double wall_time) {
  return field(1, wall_time) + field(3, std::string_view("brain.Event:2"));
}

std::string scalar_event(double wall_time, int64_t step, const Scalars& scalars) {
  std::string summary;
  for (const auto& [tag, value] : scalars) summary += field(1, field(1, std::string_view(tag)) + field(2, value));
  return field(1, wall_time) + field(2, step) + field(5, std::string_view(summary));
}

std::string histogram_event(double wall_time, int64_t step, const NamedHistograms& histograms) {
  const auto packed = [](uint64_t number, const std::vector<double>& values) {
    std::string bytes;
    for (const double value : values) bytes += bytes_of(value);
    return field(number, std::string_view(bytes));
  };
  std::string summary;
  for (const auto& [tag, h] : histograms) {
    const auto proto = field(1, h.min) + field(2, h.max) + field(3, h.num) + field(4, h.sum) + field(5, h.sum_squares) +
                       packed(6, h.limits) + packed(7, h.counts);
    summary += field(1, field(1, std::string_view(tag)) + field(5, std::string_view(proto)));
  }
  return field(1, wall_time) + field(2, step) + field(5, std::string_view(summary));
}

std::string restart_event(double wall_time, int64_t step) {
  return field(1, wall_time) + field(2, step) + field(7, std::string_view(field(1, int64_t{1})));
}

}  // namespace detail

namespace {

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::string new_path(const std::string& folder) {
  char host[256] = "host";
  gethostname(host, sizeof host - 1);
  return c10::str(folder, "/events.out.tfevents.", static_cast<int64_t>(now()), ".", host, ".", getpid());
}

}  // namespace

EventFile::EventFile(const std::string& folder, int64_t log_every, int64_t resumed_step) : log_every_(log_every) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) raise_errno(error.value(), c10::str("cannot create the folder '", folder, "'"));
  file_ = std::make_unique<AppendedFile>(new_path(folder), /*keep=*/false);
  write(detail::version_event(now()));
  if (resumed_step > 0) write(detail::restart_event(now(), resumed_step + 1));
}

void EventFile::write(const std::string& event) { file_->append(detail::tf_record(event)); }

void EventFile::on_step(const StepMetrics& m) {
  if (m.step != 1 && m.step % log_every_ != 0) return;
  const auto real = [](double x) { return static_cast<float>(x); };
  Scalars scalars{{"loss_metrics/global_avg_loss", real(m.loss)},
                  {"loss_metrics/global_max_loss", real(m.max_loss)},
                  {"grad_norm", real(m.grad_norm)},
                  {"lr", real(m.lr)},
                  {"throughput(tps)", real(m.tokens_per_second)},
                  {"tflops", real(m.tflops)},
                  {"time_metrics/end_to_end(s)", real(m.seconds)},
                  {"time_metrics/data_loading(s)", real(m.data_seconds)},
                  {"time_metrics/data_loading(%)", real(100 * m.data_seconds / m.seconds)},
                  {"memory/max_active(GiB)", real(m.memory_gib)}};
  if (m.mfu) scalars.emplace_back("mfu(%)", real(*m.mfu));
  for (const auto& [axis, traffic] : m.traffic) {
    scalars.emplace_back("comm/" + axis + "/collectives", static_cast<float>(traffic.collectives));
    scalars.emplace_back("comm/" + axis + "/bytes", static_cast<float>(traffic.bytes));
  }
  write(detail::scalar_event(now(), m.step, scalars));
}

void EventFile::write_scalars(int64_t step, const Scalars& scalars) {
  write(detail::scalar_event(now(), step, scalars));
}

void EventFile::on_histograms(int64_t step, const NamedHistograms& histograms) {
  write(detail::histogram_event(now(), step, histograms));
}

void EventFile::on_eval(const EvalMetrics& m) {
  Scalars scalars{{"validation_metrics/loss", static_cast<float>(m.loss)}};
  if (m.kind == EvalKind::Answers)
    scalars.emplace_back("validation_metrics/exact_match", static_cast<float>(m.accuracy));
  else
    scalars.emplace_back("validation_metrics/perplexity", static_cast<float>(m.perplexity()));
  if (m.kind == EvalKind::Bytes)
    scalars.emplace_back("validation_metrics/bits_per_byte", static_cast<float>(m.bits_per_byte()));
  write(detail::scalar_event(now(), m.step, scalars));
}

}  // namespace tessera::train
