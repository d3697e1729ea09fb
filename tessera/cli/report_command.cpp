#include "tessera/base/detail/text_file.h"
#include "tessera/cli/check_arguments.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/loopback_server.h"
#include "tessera/cli/report.h"

#include <filesystem>
#include <iostream>
#include <memory>

namespace tessera::cli {
namespace {

struct ReportArguments {
  std::vector<std::string> runs;
  std::string file;
  bool serve = false;
  int64_t port = 0;
};

HttpAnswer answer_report(const std::vector<ReportedRun>& runs, std::string_view path) {
  if (path == "/") return {200, "text/html", report_page(report_data(runs, true))};
  if (path == "/data.json") return {200, "application/json", report_data(runs, true).dump()};
  if (path == "/trace.json" && runs.size() == 1)
    if (auto trace = report_trace(runs.front().folder); !trace.empty()) return {200, "application/json", trace};
  return {};
}

void run_report(const ReportArguments& arguments) {
  if (arguments.serve) {
    const auto runs = open_runs(arguments.runs);
    LoopbackServer server(arguments.port);
    std::cout << server.address() << " (Ctrl-C ends it)" << std::endl;
    server.run([&](std::string_view path) { return answer_report(runs, path); });
    return;
  }
  if (arguments.runs.size() == 1 && arguments.file.empty()) {
    std::cout << write_report(arguments.runs.front()) << '\n';
    return;
  }
  const auto file = arguments.file.empty() ? "report.html" : arguments.file;
  write_text_file(file, report_page(report_data(open_runs(arguments.runs))));
  std::cout << file << '\n';
}

}  // namespace

void add_report_command(CLI::App& app) {
  auto arguments = std::make_shared<ReportArguments>();
  auto* command = app.add_subcommand(
      "report", "Write an HTML page about a training run, or about several to compare them; or serve it live");
  command->add_option("runs", arguments->runs, "Output folders of tessera train")->required();
  command->add_option("-o,--output", arguments->file,
                      "Output file (default: report.html in the folder of the run; of several runs: report.html here)");
  command->add_flag("--serve", arguments->serve, "Serve the page at 127.0.0.1; it follows the run");
  command->add_option("--port", arguments->port, "Port of --serve (0: a free one)")
      ->check(in_range(0, 65535))
      ->capture_default_str();
  command->footer(
      "tessera train writes report.html and trace.json (for ui.perfetto.dev) at its end. The page is one file and "
      "needs "
      "no network.\n"
      "Examples:\n"
      "  tessera report outputs/20260131-174502-gpt-tiny\n"
      "  tessera report --serve outputs/20260131-174502-gpt-tiny\n"
      "  tessera report outputs/a outputs/b -o compare.html");
  command->callback([arguments] { run_report(*arguments); });
}

}  // namespace tessera::cli
