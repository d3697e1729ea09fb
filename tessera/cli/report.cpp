#include "tessera/cli/report.h"

#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/cli/train_config_file.h"
#include "tessera/debug/detail/step_profile.h"
#include "tessera/train/detail/config_options.h"
#include "tessera/train/plan.h"
#include "tessera/version.h"

#include <ATen/Parallel.h>
#include <sys/utsname.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <limits>
#include <set>
#include <sstream>
#include <thread>

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

// A page of a long run shows about this many steps: of each interval the steps with the smallest and the largest loss.
constexpr size_t kShownSteps = 3000;
constexpr int64_t kTimelinePixels = 1500;
constexpr size_t kMemoryPoints = 600;

std::string time_text(std::time_t time) {
  std::tm local{};
  localtime_r(&time, &local);
  std::ostringstream text;
  text << std::put_time(&local, "%Y-%m-%d %H:%M:%S");
  return text.str();
}

template <class T>
Json array_of(const std::vector<T>& values) {
  Json::Array items;
  for (const auto& value : values) items.emplace_back(value);
  return items;
}

double number_or_nan(const Json* json) {
  if (json)
    if (const auto* number = json->get_if<double>()) return *number;
  if (json)
    if (const auto* number = json->get_if<int64_t>()) return static_cast<double>(*number);
  return std::numeric_limits<double>::quiet_NaN();
}

// ---- what does not change

Json config_json(const train::TrainConfig& config) {
  std::vector<std::string> defaults;
  const train::TrainConfig default_config;
  train::visit_options(default_config, [&](const train::OptionInfo&, const auto& value) {
    defaults.push_back(train::option_text(value));
  });
  Json::Array options;
  size_t i = 0;
  train::visit_options(config, [&](const train::OptionInfo& info, const auto& value) {
    options.emplace_back(Json::Object{
        {"key", info.key}, {"value", train::option_text(value)}, {"default", defaults[i++]}, {"help", info.help}});
  });
  return options;
}

Json plan_json(const train::TrainPlan& plan) {
  Json::Array parameters, traffic, memory;
  for (const auto& p : plan.parameters)
    parameters.emplace_back(Json::Object{{"name", p.name},
                                         {"sizes", array_of(p.sizes)},
                                         {"local", array_of(p.local_sizes)},
                                         {"placements", p.placements},
                                         {"bytes", p.local_bytes}});
  for (const auto& t : plan.traffic)
    traffic.emplace_back(Json::Object{{"axis", t.axis},
                                      {"what", t.what},
                                      {"collectives", t.traffic.collectives},
                                      {"bytes", t.traffic.bytes},
                                      {"estimate", int64_t{t.estimate}}});
  for (const auto& m : plan.memory)
    memory.emplace_back(Json::Object{{"kind", m.kind}, {"bytes", m.bytes}, {"estimate", int64_t{m.estimate}}});
  Json::Object json{{"parameters", std::move(parameters)},
                    {"traffic", std::move(traffic)},
                    {"memory", std::move(memory)},
                    {"memory_rank", plan.memory_rank}};
  if (plan.pipeline) {
    Json::Array ranks;
    for (const auto& r : plan.pipeline->ranks)
      ranks.emplace_back(Json::Object{
          {"stages", array_of(r.stages)}, {"blocks", r.blocks}, {"memory", r.memory_bytes}, {"busy", r.busy}});
    json.emplace_back("pipeline", Json::Object{{"schedule", plan.pipeline->schedule},
                                               {"microbatches", plan.pipeline->microbatches},
                                               {"bubble", plan.pipeline->bubble},
                                               {"ranks", std::move(ranks)}});
  }
  return json;
}

Json read_json(const std::string& path) { return Json::parse(read_text_file(path, "the file"), "'" + path + "'"); }

int64_t ranks_of_run(const std::string& folder, const train::TrainConfig& config) {
  if (fs::exists(folder + "/run.json")) return read_json(folder + "/run.json").at("ranks").number();
  return std::max<int64_t>(1, train::ranks_of(config.parallel));
}

std::string short_number(int64_t count) {
  const double millions = static_cast<double>(count) / 1e6;
  std::ostringstream text;
  text << std::fixed << std::setprecision(millions < 10 ? 2 : 0) << millions << "M";
  return text.str();
}

ReportedRun open_run(const std::string& folder) {
  const auto file = folder + "/config.toml";
  TESSERA_CHECK(fs::exists(file), UsageError, "'", folder,
                "' is not an output folder of tessera train: it has no config.toml");
  train::TrainConfig config;
  read_train_config(config, file);
  const int64_t ranks = ranks_of_run(folder, config);
  const auto mesh = train::mesh_shape(config, ranks);
  Json::Object fixed{
      {"title", c10::str(config.model.name, " on ", config.data.path)},
      {"lead", c10::str(short_number(models::parameter_count(train::model_config(config.model))), " parameters, batch ",
                        config.training.batch, " x ", train::sequence_length(config), " tokens, mesh ", mesh, ", ",
                        config.training.precision, config.training.compile ? ", compiled" : "")},
      {"mesh", c10::str(mesh)},
      {"axes", Json::Object{{"names", array_of(mesh.names)},
                            {"shape", array_of(mesh.shape)},
                            {"experts", train::expert_ranks(config.parallel)}}},
      {"steps_planned", config.training.steps},
      {"compiled", int64_t{config.training.compile}},
      {"config", config_json(config)}};
  try {
    const int threads = at::get_num_threads();
    at::set_num_threads(1);  // the plan runs small ops
    fixed.emplace_back("plan", plan_json(train::plan_training(config, ranks)));
    at::set_num_threads(threads);
  } catch (const UsageError& error) {
    fixed.emplace_back("plan_error", error.what_without_backtrace());
  }
  auto name = fs::path(folder).lexically_normal();
  if (!name.has_filename()) name = name.parent_path();
  return {folder, name == "." ? fs::current_path().filename().string() : name.filename().string(), std::move(fixed)};
}

// ---- metrics

struct MetricsOfRun {
  std::vector<Json> steps, evals;
};
// The lines of metrics.jsonl. A run that goes on may have written a part of the last one.
MetricsOfRun read_metrics(const std::string& folder) {
  MetricsOfRun metrics;
  if (!fs::exists(folder + "/metrics.jsonl")) return metrics;
  std::istringstream all(read_text_file(folder + "/metrics.jsonl", "the metrics"));
  for (std::string line; std::getline(all, line);) {
    try {
      auto json = Json::parse(line, "a line of metrics");
      (json.find("eval_loss") ? metrics.evals : metrics.steps).push_back(std::move(json));
    } catch (const UsageError&) {  // incomplete
    }
  }
  return metrics;
}

std::vector<size_t> shown_steps(const std::vector<Json>& steps) {
  std::vector<size_t> shown;
  const size_t per_interval = 2 * steps.size() / kShownSteps + 1;
  if (per_interval <= 2) {
    for (size_t i = 0; i < steps.size(); i++) shown.push_back(i);
    return shown;
  }
  for (size_t begin = 0; begin < steps.size(); begin += per_interval) {
    const size_t end = std::min(begin + per_interval, steps.size());
    size_t low = begin, high = begin;
    for (size_t i = begin; i < end; i++) {
      if (number_or_nan(steps[i].find("loss")) < number_or_nan(steps[low].find("loss"))) low = i;
      if (number_or_nan(steps[i].find("loss")) > number_or_nan(steps[high].find("loss"))) high = i;
    }
    std::set<size_t> both{low, high};
    if (end == steps.size()) both.insert(end - 1);
    shown.insert(shown.end(), both.begin(), both.end());
  }
  return shown;
}

// One array per key that any line has; null where a line does not have it.
void add_columns(Json::Object& to, const std::vector<Json>& lines, const std::vector<size_t>& shown,
                 const std::vector<std::pair<const char*, const char*>>& keys, const char* inside = nullptr) {
  for (const auto& [key, name] : keys) {
    Json::Array column;
    bool any = false;
    for (const size_t i : shown) {
      const Json* outer = inside ? lines[i].find(inside) : &lines[i];
      const Json* value = outer ? outer->find(key) : nullptr;
      any = any || value;
      column.push_back(value ? *value : Json());
    }
    if (any || std::string_view(key) == "step" || std::string_view(key) == "loss")
      to.emplace_back(name, std::move(column));
  }
}

void add_metrics(Json::Object& run, const MetricsOfRun& metrics) {
  const auto shown = shown_steps(metrics.steps);
  Json::Object steps, evals;
  add_columns(steps, metrics.steps, shown,
              {{"step", "step"},
               {"loss", "loss"},
               {"grad_norm", "grad_norm"},
               {"lr", "lr"},
               {"tps", "tps"},
               {"mfu", "mfu"},
               {"seconds", "seconds"},
               {"memory_gib", "memory_gib"}});
  add_columns(steps, metrics.steps, shown, {{"aux_loss", "aux_loss"}, {"dropped", "dropped"}, {"max_load", "max_load"}},
              "router");
  std::vector<size_t> all_evals;
  for (size_t i = 0; i < metrics.evals.size(); i++) all_evals.push_back(i);
  add_columns(evals, metrics.evals, all_evals,
              {{"step", "step"}, {"eval_loss", "loss"}, {"exact_match", "exact_match"}, {"perplexity", "perplexity"}});
  if (metrics.evals.empty()) evals = {{"step", Json::Array()}, {"loss", Json::Array()}};
  Json::Array recompiles, skipped, comm;
  for (const auto& line : metrics.steps) {
    if (const auto* why = line.find("recompiled")) recompiles.emplace_back(Json::Array{line.at("step"), *why});
    if (const auto* why = line.find("skipped")) skipped.emplace_back(Json::Array{line.at("step"), *why});
  }
  Json parameter_bytes = Json::Array();
  if (!metrics.steps.empty()) {
    const auto& last = metrics.steps.back();
    if (const auto* bytes = last.find("parameter_bytes")) parameter_bytes = *bytes;
    if (const auto* by_axis = last.find("comm"))
      for (const auto& [axis, traffic] : by_axis->members())
        comm.emplace_back(
            Json::Object{{"axis", axis}, {"collectives", traffic.at("collectives")}, {"bytes", traffic.at("bytes")}});
  }
  run.emplace_back("steps", std::move(steps));
  run.emplace_back("evals", std::move(evals));
  run.emplace_back("recompiles", std::move(recompiles));
  run.emplace_back("skipped", std::move(skipped));
  run.emplace_back("parameter_bytes", std::move(parameter_bytes));
  run.emplace_back("comm", std::move(comm));
}

// ---- the profiled step

std::vector<debug::StepProfile> read_profiles(const std::string& folder) {
  std::vector<debug::StepProfile> profiles;
  if (!fs::is_directory(folder + "/profile")) return profiles;
  for (const auto& entry : fs::directory_iterator(folder + "/profile")) {
    if (entry.path().extension() != ".json") continue;
    const auto path = entry.path().string();
    profiles.push_back(debug::parse_step_profile(read_text_file(path, "the profile"), "'" + path + "'"));
  }
  std::sort(profiles.begin(), profiles.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return profiles;
}

// The largest value of each of the intervals.
Json memory_points(const std::vector<std::pair<int64_t, int64_t>>& memory) {
  Json::Array points;
  const size_t per_point = memory.size() / kMemoryPoints + 1;
  for (size_t begin = 0; begin < memory.size(); begin += per_point) {
    auto most = memory[begin];
    for (size_t i = begin; i < std::min(begin + per_point, memory.size()); i++)
      if (memory[i].second > most.second) most = memory[i];
    points.emplace_back(Json::Array{most.first, most.second});
  }
  return points;
}

Json rank_json(const debug::StepProfile& p, int64_t origin) {
  Json::Array intervals, flights;
  const int64_t resolution = p.duration / kTimelinePixels;
  for (const auto& i : debug::timeline(p, resolution))
    intervals.emplace_back(
        Json::Array{int64_t{i.kind == debug::ProfileInterval::Kind::Exposed}, i.start, i.end - i.start});
  int64_t in_flight = 0, blocked = 0, end = -1;
  for (const auto& c : p.collectives) {
    in_flight += c.in_flight();
    blocked += c.exposed();
    if (flights.empty() || c.posted - end > resolution)
      flights.emplace_back(Json::Array{c.posted, c.in_flight()});
    else
      flights.back() =
          Json::Array{flights.back().items()[0], std::max(end, c.done) - flights.back().items()[0].number()};
    end = std::max(end, c.done);
  }
  return Json::Object{{"rank", p.rank},
                      {"start", p.start - origin},
                      {"duration", p.duration},
                      {"clock_error", p.clock_error},
                      {"intervals", std::move(intervals)},
                      {"flights", std::move(flights)},
                      {"in_flight", in_flight},
                      {"blocked", blocked},
                      {"memory", memory_points(p.memory)}};
}

Json profile_json(const std::vector<debug::StepProfile>& profiles) {
  const auto ranks = static_cast<int64_t>(profiles.size());
  int64_t origin = std::numeric_limits<int64_t>::max();
  for (const auto& p : profiles) origin = std::min(origin, p.start);
  Json::Array rank_items, ops, collectives;
  std::map<std::string, debug::OpTime> by_op;
  std::map<std::pair<std::string, std::string>, debug::CollectiveTime> by_kind;
  for (const auto& p : profiles) {
    rank_items.push_back(rank_json(p, origin));
    for (const auto& op : debug::time_by_op(p)) {
      by_op[op.name].calls += op.calls;
      by_op[op.name].self += op.self;
    }
    for (const auto& c : debug::time_by_collective(p)) {
      auto& sum = by_kind[{c.kind, c.group}];
      sum.calls += c.calls, sum.bytes += c.bytes, sum.in_flight += c.in_flight, sum.exposed += c.exposed;
    }
  }
  std::vector<std::pair<int64_t, Json>> sorted_ops, sorted_collectives;
  for (const auto& [name, op] : by_op)
    sorted_ops.emplace_back(op.self,
                            Json::Object{{"name", name}, {"calls", op.calls / ranks}, {"self", op.self / ranks}});
  for (const auto& [key, c] : by_kind)
    sorted_collectives.emplace_back(c.exposed, Json::Object{{"kind", key.first},
                                                            {"group", key.second},
                                                            {"calls", c.calls / ranks},
                                                            {"bytes", c.bytes / ranks},
                                                            {"in_flight", c.in_flight / ranks},
                                                            {"exposed", c.exposed / ranks}});
  const auto longest_first = [](const auto& a, const auto& b) { return a.first > b.first; };
  std::stable_sort(sorted_ops.begin(), sorted_ops.end(), longest_first);
  std::stable_sort(sorted_collectives.begin(), sorted_collectives.end(), longest_first);
  for (auto& [time, json] : sorted_ops) ops.push_back(std::move(json));
  for (auto& [time, json] : sorted_collectives) collectives.push_back(std::move(json));
  return Json::Object{{"step", profiles.front().step},
                      {"ranks", std::move(rank_items)},
                      {"ops", std::move(ops)},
                      {"collectives", std::move(collectives)}};
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

// "completed", "stopped", "running", or "unknown": the run has not ended, and its last line is older than a minute.
std::string state_of(const Json* run_file, const std::string& folder) {
  const auto state = run_file ? run_file->at("state").text() : "running";
  if (state != "running") return state;
  std::error_code error;
  const auto written = fs::last_write_time(folder + "/metrics.jsonl", error);
  const bool fresh = !error && fs::file_time_type::clock::now() - written < std::chrono::minutes(1);
  return fresh ? "running" : "unknown";
}

}  // namespace

std::vector<ReportedRun> open_runs(const std::vector<std::string>& folders) {
  std::vector<ReportedRun> runs;
  std::set<std::string> names;
  for (const auto& folder : folders) {
    runs.push_back(open_run(folder));
    if (!names.insert(runs.back().name).second) runs.back().name = folder;  // two runs of one name
  }
  return runs;
}

Json report_data(const std::vector<ReportedRun>& runs, bool live) {
  Json::Array items;
  for (const auto& run : runs) {
    auto item = run.fixed.members();
    item.emplace_back("name", run.name);
    Json run_file;
    const bool has_run_file = fs::exists(run.folder + "/run.json");
    if (has_run_file) run_file = read_json(run.folder + "/run.json");
    item.emplace_back("state", state_of(has_run_file ? &run_file : nullptr, run.folder));
    if (const auto* stopped = run_file.find("stopped")) item.emplace_back("stopped", *stopped);
    Json::Array versions;
    if (const auto* list = run_file.find("versions"))
      for (const auto& [name, value] : list->members()) versions.emplace_back(Json::Array{name, value});
    item.emplace_back("versions", std::move(versions));
    add_metrics(item, read_metrics(run.folder));
    if (const auto profiles = read_profiles(run.folder); !profiles.empty())
      item.emplace_back("profile", profile_json(profiles));
    items.emplace_back(std::move(item));
  }
  return Json::Object{{"made", time_text(std::time(nullptr))}, {"live", int64_t{live}}, {"runs", std::move(items)}};
}

std::string report_page(const Json& data) {
  // In a script element, only "<" can end it. JSON has it only inside of strings.
  std::string text;
  for (const char c : data.dump()) text += c == '<' ? "\\u003c" : std::string(1, c);
  std::string page(report_template());
  const std::string_view mark = "@data@";
  return page.replace(page.find(mark), mark.size(), text);
}

std::string report_trace(const std::string& folder) {
  const auto profiles = read_profiles(folder);
  return profiles.empty() ? "" : debug::chrome_trace(profiles);
}

std::string write_report(const std::string& folder) {
  const auto page = folder + "/report.html";
  write_text_file(page, report_page(report_data(open_runs({folder}))));
  if (const auto trace = report_trace(folder); !trace.empty()) write_text_file(folder + "/trace.json", trace);
  return page;
}

void write_run_file(const std::string& folder, int64_t ranks, RunState state, const std::string& stopped) {
  utsname system{};
  uname(&system);
  Json::Object versions{
      {"Tessera", TESSERA_VERSION},
      {"LibTorch", TORCH_VERSION},
      {"compiler", c10::str(
#ifdef __clang__
                       "clang "
#else
                       "gcc "
#endif
                       ,
                       __VERSION__)},
      {"host", std::string(system.nodename)},
      {"system", c10::str(system.sysname, " ", system.release, " ", system.machine)},
      {"processor", c10::str(processor_name(), ", ", std::thread::hardware_concurrency(), " threads")},
      {"written", time_text(std::time(nullptr))}};
  const char* names[] = {"running", "completed", "stopped"};
  Json::Object run{{"ranks", ranks}, {"state", names[static_cast<size_t>(state)]}, {"versions", std::move(versions)}};
  if (!stopped.empty()) run.emplace_back("stopped", stopped);
  write_text_file(folder + "/run.json", Json(std::move(run)).dump() + "\n");
}

}  // namespace tessera::cli
