#pragma once
#include "tessera/base/detail/json.h"

#include <cstdint>
#include <string>
#include <vector>

// `tessera report`: an HTML page about training runs, from the files in their output folders. The page is one file and
// needs no network.
namespace tessera::train {
struct TrainConfig;
}

namespace tessera::cli {

// What of a run does not change while it goes on.
struct ReportedRun {
  std::string folder;
  std::string name;  // in the page: the last part of the folder
  Json fixed;        // config, mesh, plan
};
// Reads config.toml and makes the plan. Throws UsageError if the folder is not an output folder of tessera train.
// Requires: this thread has no world.
std::vector<ReportedRun> open_runs(const std::vector<std::string>& folders);

// The data of the page, from the files as they are now. `live`: the page asks its server for new data.
Json report_data(const std::vector<ReportedRun>& runs, bool live = false);
// The page with its data.
std::string report_page(const Json& data);
// The trace of the profiled step of a run, for Perfetto; "" if it has no profile.
std::string report_trace(const std::string& folder);

// Writes report.html and, if the run has a profile, trace.json into the folder of a run. Returns the path of the page.
std::string write_report(const std::string& folder);

// Writes run.json: versions, machine, and how the run ended; `stopped`: why it ended early.
enum class RunState : uint8_t { Running, Completed, Stopped };
void write_run_file(const std::string& folder, int64_t ranks, RunState state, const std::string& stopped = {});

// The template of the page. CMake makes it from report_page.html.
std::string_view report_template();

}  // namespace tessera::cli
