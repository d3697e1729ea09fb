#include "tessera/cli/plan_report.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/fake_world.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/train/detail/text_table.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <iomanip>
#include <ostream>
#include <sstream>

namespace tessera::cli {
namespace {

// "GPT2.h.0.attn.c_attn" -> "h.*.attn.c_attn". The layer that ran represents all layers.
std::string as_pattern(const std::string& name, const std::string& root) {
  std::string path = name == root ? "" : name.substr(std::min(name.size(), root.size() + 1));
  for (const std::string_view first : {"h.0", "layers.0"})
    if (path.starts_with(first)) path.replace(first.size() - 1, 1, "*");
  return path;
}

std::string short_name(const std::string& collective) {  // "c10d_functional.all_reduce" -> "all_reduce"
  return collective.substr(collective.find('.') + 1);
}

// The collectives that CommDebugMode recorded, by module pattern.
std::map<std::string, ModuleTraffic> traffic_of(const CommDebugMode& mode, const std::string& root) {
  std::map<std::string, ModuleTraffic> by_pattern;
  for (const auto& [module, counts] : mode.get_comm_counts_by_module()) {
    auto& traffic = by_pattern[as_pattern(module, root)];
    for (const auto& [name, count] : counts.by_name()) {
      traffic.collectives += (traffic.collectives.empty() ? "" : ", ") +
                             (count > 1 ? std::to_string(count) + " " : std::string()) + short_name(name);
      traffic.count += count;
    }
    traffic.bytes += mode.get_bytes_by_module().at(module);
  }
  return by_pattern;
}

ModuleTraffic take(std::map<std::string, ModuleTraffic>& from, const std::string& pattern) {
  auto node = from.extract(pattern);
  return node ? node.mapped() : ModuleTraffic();
}

ModuleTraffic sum_of(const std::map<std::string, ModuleTraffic>& from) {
  ModuleTraffic sum;
  for (const auto& [pattern, traffic] : from) {
    sum.collectives += (sum.collectives.empty() ? "" : ", ") + traffic.collectives;
    sum.count += traffic.count;
    sum.bytes += traffic.bytes;
  }
  return sum;
}

models::GPT2Config one_layer(models::GPT2Config config, int64_t& layers) {
  layers = std::exchange(config.n_layer, 1);
  return config;
}
models::LlamaConfig one_layer(models::LlamaConfig config, int64_t& layers) {
  layers = std::exchange(config.n_layers, 1);
  return config;
}
models::GPT2 make_model(const models::GPT2Config& config) { return models::GPT2(config); }
models::Llama make_model(const models::LlamaConfig& config) { return models::Llama(config); }

template <class Config>
void fill(PlanReport& report, const Config& full_config) {
  const auto& request = report.request;
  const auto config = one_layer(full_config, report.layers);
  const FakeWorld world(request.ranks);
  const auto mesh = init_device_mesh("cpu", {request.ranks}, {"tp"});
  auto model = deferred_init([&] { return make_model(config); });
  const auto works = resolve_plan(*model, mesh, report.plan);
  parallelize_module(model, mesh, report.plan);
  materialize(*model);

  const auto tokens = at::zeros({request.batch, request.sequence}, at::kLong);
  const auto root = class_name(*model);
  CommDebugMode mode;
  const LossParallel loss_parallel;
  auto loss = models::loss(model(tokens), tokens);
  auto forward = traffic_of(mode, root);
  mode.reset();
  loss.backward();
  auto backward = traffic_of(mode, root);

  for (const auto& work : works) {
    const auto pattern = as_pattern(root + "." + work.path, root);
    const bool in_layer = pattern.find('*') != std::string::npos;
    report.rows.push_back({pattern.empty() ? "(root)" : pattern, in_layer ? report.layers : 1, work,
                           take(forward, pattern), take(backward, pattern)});
  }
  report.other_forward = sum_of(forward), report.other_backward = sum_of(backward);
  // All layers have the same sizes.
  int64_t all = 0, layer = 0;
  for (const auto& item : model->named_parameters()) {
    const auto local = is_dtensor(*item) ? DTensor(item->detach()).to_local().numel() : item->numel();
    all += local;
    if (as_pattern(root + "." + item.key(), root).find('*') != std::string::npos) layer += local;
  }
  report.parameters = models::parameter_count(full_config);
  report.local_parameters = all + layer * (report.layers - 1);
}

std::string megabytes(int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(bytes < 10'000'000 ? 2 : 1) << static_cast<double>(bytes) / 1e6 << " MB";
  return text.str();
}
std::string traffic_text(const ModuleTraffic& traffic) {
  return traffic.count == 0 ? "-" : traffic.collectives + "  " + megabytes(traffic.bytes);
}
std::string parameter_text(const ParameterPlan& p) {
  return c10::str(p.name, " ", at::IntArrayRef(p.sizes), " ", p.placement, " ", at::IntArrayRef(p.local_sizes));
}

}  // namespace

PlanReport make_plan_report(const PlanRequest& request) {
  TESSERA_CHECK(request.ranks >= 1, UsageError, "cannot plan for ", request.ranks, " ranks; use at least 1");
  TESSERA_CHECK(request.batch >= 1 && request.sequence >= 1, UsageError, "the batch ", request.batch, " x ",
                request.sequence, " is empty");
  // One layer runs on this host.
  constexpr int64_t kMaxTokens = 1 << 16;
  TESSERA_CHECK(request.batch <= kMaxTokens / request.sequence, UsageError, "the batch ", request.batch, " x ",
                request.sequence, " has more than ", kMaxTokens, " tokens; use a smaller --batch or --seq");
  PlanReport report;
  report.request = request;
  const auto& config = models::find_config(request.model);
  report.plan = request.plan ? *request.plan : models::tensor_parallel_plan(config, request.options);
  std::visit([&](const auto& c) { fill(report, c); }, config);
  return report;
}

std::ostream& operator<<(std::ostream& out, const PlanReport& report) {
  const auto& request = report.request;
  out << request.model << " on tp=" << request.ranks << ", a batch of " << request.batch << " x " << request.sequence
      << " tokens; " << report.layers << " layers, of which one was run\n\n";
  train::TextTable lines{
      {"module", "x", "kind", "style", "parameters: global sizes, placement, local sizes", "forward", "backward"}};
  ModuleTraffic forward = report.other_forward, backward = report.other_backward;
  for (const auto& row : report.rows) {
    const auto& parameters = row.work.parameters;
    lines.push_back({row.module, std::to_string(row.count), row.work.kind, c10::str(row.work.style),
                     parameters.empty() ? "-" : parameter_text(parameters[0]), traffic_text(row.forward),
                     traffic_text(row.backward)});
    for (size_t i = 1; i < parameters.size(); i++)
      lines.push_back({"", "", "", "", parameter_text(parameters[i]), "", ""});
    forward.count += row.forward.count * row.count, forward.bytes += row.forward.bytes * row.count;
    backward.count += row.backward.count * row.count, backward.bytes += row.backward.bytes * row.count;
  }
  if (report.other_forward.count + report.other_backward.count > 0)
    lines.push_back(
        {"(other modules)", "1", "", "", "", traffic_text(report.other_forward), traffic_text(report.other_backward)});
  train::print_table(out, lines);
  out << "\nPer step: " << forward.count << " collectives in forward, " << megabytes(forward.bytes) << "; "
      << backward.count << " in backward, " << megabytes(backward.bytes) << ".\nParameters: " << report.parameters
      << ", of which rank 0 has " << report.local_parameters << " (" << megabytes(report.local_parameters * 4)
      << " in fp32).\n";
  return out;
}

}  // namespace tessera::cli
