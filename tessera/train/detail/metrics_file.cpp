#include "tessera/train/detail/metrics_file.h"

#include "tessera/base/error.h"

#include <charconv>
#include <cmath>

namespace tessera::train {
namespace {

std::string json(double value) {
  if (!std::isfinite(value)) return "null";
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::string json(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return quoted + '"';
}

}  // namespace

std::string json_line(const StepMetrics& m) {
  std::string line =
      c10::str("{\"step\":", m.step, ",\"loss\":", json(m.loss), ",\"max_loss\":", json(m.max_loss),
               ",\"grad_norm\":", json(m.grad_norm), ",\"lr\":", json(m.lr), ",\"tps\":", json(m.tokens_per_second),
               ",\"tflops\":", json(m.tflops), m.mfu ? ",\"mfu\":" + json(*m.mfu) : "",
               ",\"seconds\":", json(m.seconds), ",\"data_seconds\":", json(m.data_seconds),
               ",\"memory_gib\":", json(m.memory_gib), ",\"samples_read\":", m.samples_read, ",\"parameter_bytes\":[");
  for (size_t i = 0; i < m.parameter_bytes.size(); i++) line += c10::str(i ? "," : "", m.parameter_bytes[i]);
  line += "],\"comm\":{";
  const char* comma = "";
  for (const auto& [axis, traffic] : m.traffic) {
    line += c10::str(comma, json(axis), ":{\"collectives\":", traffic.collectives, ",\"bytes\":", traffic.bytes, "}");
    comma = ",";
  }
  line += "}";
  if (!m.skipped.empty()) line += ",\"skipped\":" + json(m.skipped);
  return line + "}";
}

std::string json_line(const EvalMetrics& m) {
  return c10::str("{\"step\":", m.step, ",\"eval_loss\":", json(m.loss), ",\"exact_match\":", json(m.accuracy),
                  ",\"eval_samples\":", m.samples, "}");
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
