#include "tessera/train/detail/metrics_file.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/error.h"
#include "tessera/train/config.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <sstream>

namespace tessera::train {
namespace {

// JSON has no NaN or infinity. Integers are written without ".0".
Json json_number(double value) {
  if (!std::isfinite(value)) return {};
  const bool is_integer = std::abs(value) < 1e15 && value == std::trunc(value);
  return is_integer ? Json(static_cast<int64_t>(value)) : Json(value);
}

// Removes the lines after a step, and what is not a line of metrics: a run that was killed may have written part of
// one. Returns the step of the last validation that is left; 0: none.
int64_t keep_steps(const std::string& path, int64_t last_step) {
  if (!std::filesystem::exists(path)) return 0;
  std::istringstream all(read_text_file(path, "the metrics"));
  std::string kept;
  int64_t last_eval = 0;
  for (std::string line; std::getline(all, line);) {
    try {
      const auto json = Json::parse(line, path);
      const int64_t step = json.at("step").number();
      if (step > last_step) continue;
      if (json.find("eval_loss")) last_eval = step;
      kept += line + "\n";
    } catch (const UsageError&) {  // not a line of metrics
    }
  }
  write_text_file(path, kept);
  return last_eval;
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
  if (m.mfu) {
    line.emplace_back("mfu", json_number(*m.mfu));
    line.emplace_back("peak_tflops", json_number(m.peak_tflops));
  }
  line.emplace_back("seconds", json_number(m.seconds));
  line.emplace_back("data_seconds", json_number(m.data_seconds));
  line.emplace_back("memory_gib", json_number(m.memory_gib));
  line.emplace_back("samples_read", m.samples_read);
  line.emplace_back("parameter_bytes", std::move(parameter_bytes));
  line.emplace_back("comm", std::move(comm));
  if (m.router)
    line.emplace_back("router", Json::Object{{"aux_loss", json_number(m.router->aux_loss)},
                                             {"dropped", json_number(m.router->dropped)},
                                             {"max_load", json_number(m.router->max_load)}});
  if (!m.recompiled.empty()) line.emplace_back("recompiled", m.recompiled);
  if (!m.skipped.empty()) line.emplace_back("skipped", m.skipped);
  return Json(std::move(line)).dump();
}

std::string json_line(const EvalMetrics& m) {
  Json::Object line{{"step", m.step}, {"eval_loss", json_number(m.loss)}};
  if (m.kind == EvalKind::Answers)
    line.emplace_back("exact_match", json_number(m.accuracy));
  else
    line.emplace_back("perplexity", json_number(m.perplexity()));
  if (m.kind == EvalKind::Bytes) line.emplace_back("bits_per_byte", json_number(m.bits_per_byte()));
  line.emplace_back("eval_samples", m.samples);
  return Json(std::move(line)).dump();
}

MetricsFile::MetricsFile(const std::string& path, int64_t resumed_step)
    : last_eval_(resumed_step > 0 ? keep_steps(path, resumed_step) : 0), file_(path, resumed_step > 0) {}

void MetricsFile::on_eval(const EvalMetrics& metrics) {
  if (metrics.step > last_eval_) file_.append(json_line(metrics) + "\n");
  last_eval_ = std::max(last_eval_, metrics.step);
}

namespace {

// Removes the lines after a step, and an incomplete last line. Returns whether lines are kept.
bool keep_losses(const std::string& path, int64_t last_step) {
  if (last_step == 0 || !std::filesystem::exists(path)) return false;
  std::istringstream all(read_text_file(path, "the losses"));
  std::string kept;
  for (std::string line; std::getline(all, line) && !all.eof();)
    if (std::atoll(line.c_str()) <= last_step) kept += line + "\n";
  write_text_file(path, kept);
  return true;
}

}  // namespace

LossFile::LossFile(const std::string& path, int64_t resumed_step) : file_(path, keep_losses(path, resumed_step)) {}

void LossFile::on_step(const StepMetrics& m) {
  file_.append(option_text(m.step) + " " + option_text(m.loss) + " " + option_text(m.grad_norm) + "\n");
}

}  // namespace tessera::train
