#include "tessera/train/detail/metrics_file.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/error.h"

#include <cmath>

namespace tessera::train {
namespace {

// JSON has no NaN or infinity. Integers are written without ".0".
Json json_number(double value) {
  if (!std::isfinite(value)) return {};
  const bool is_integer = std::abs(value) < 1e15 && value == std::trunc(value);
  return is_integer ? Json(static_cast<int64_t>(value)) : Json(value);
}

}  // namespace

std::string json_line(const StepMetrics& m) {
  Json::Array parameter_bytes;
  for (const auto bytes : m.parameter_bytes) parameter_bytes.emplace_back(bytes);
  Json::Object comm;
  for (const auto& [axis, traffic] : m.traffic)
    comm.emplace_back(axis, Json::Object{{"collectives", traffic.collectives}, {"bytes", traffic.bytes}});
  Json::Object line{{"step", m.step},
                    {"loss", json_number(m.loss)},
                    {"max_loss", json_number(m.max_loss)},
                    {"grad_norm", json_number(m.grad_norm)},
                    {"lr", json_number(m.lr)},
                    {"tps", json_number(m.tokens_per_second)},
                    {"tflops", json_number(m.tflops)}};
  if (m.mfu) line.emplace_back("mfu", json_number(*m.mfu));
  line.emplace_back("seconds", json_number(m.seconds));
  line.emplace_back("data_seconds", json_number(m.data_seconds));
  line.emplace_back("memory_gib", json_number(m.memory_gib));
  line.emplace_back("samples_read", m.samples_read);
  line.emplace_back("parameter_bytes", std::move(parameter_bytes));
  line.emplace_back("comm", std::move(comm));
  if (!m.skipped.empty()) line.emplace_back("skipped", m.skipped);
  return Json(std::move(line)).dump();
}

std::string json_line(const EvalMetrics& m) {
  return Json(Json::Object{{"step", m.step},
                           {"eval_loss", json_number(m.loss)},
                           {"exact_match", json_number(m.accuracy)},
                           {"eval_samples", m.samples}})
      .dump();
}

MetricsFile::MetricsFile(const std::string& path, bool append)
    : path_(path), file_(path, append ? std::ios::app : std::ios::out) {
  TESSERA_CHECK(file_, UsageError, "cannot write ", path);
}

void MetricsFile::write(const std::string& line) {
  file_ << line << std::endl;
  TESSERA_CHECK(file_, UsageError, "cannot write ", path_);
}

}  // namespace tessera::train
