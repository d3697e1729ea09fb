#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/trace.h"

#include <fstream>
#include <iostream>
#include <memory>

namespace tessera::cli {

void add_trace_command(CLI::App& app) {
  struct Arguments {
    TraceRequest request;
    std::vector<std::string> passes;
    std::string file;
  };
  auto given = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("trace", "Compiles a train step and writes how it came to be as one HTML page");
  auto& request = given->request;
  std::string ways = "How to be parallel:";
  for (const auto& way : parallel_ways()) ways += std::string("\n  ") + way.name + ": " + way.help;
  command->add_option("--model", request.model, "mlp, or a model by name")->capture_default_str();
  command->add_option("--parallel", request.parallel, ways)->capture_default_str();
  command->add_option("--ranks", request.ranks, "Ranks; they are threads")->capture_default_str();
  command->add_option("--passes", given->passes, "Passes in order, with commas; `tessera opt --list` shows them")
      ->delimiter(',');
  command->add_option("--batch", request.batch, "Rows of a rank's batch")->capture_default_str();
  command->add_option("--seq", request.sequence, "Tokens of a row")->capture_default_str();
  command->add_option("-o,--output", given->file, "The page")->required();
  command->footer(
      "Example:\n  tessera trace --model gpt-tiny --parallel tp -o page.html\n"
      "A program of yours writes such pages for all that it compiles where TESSERA_TRACE_DIR names a folder.");
  command->callback([given, command] {
    auto request = given->request;
    if (command->count("--passes") > 0) request.passes = given->passes;
    std::ofstream out(given->file, std::ios::binary);
    TESSERA_CHECK(out, UsageError, "cannot write '", given->file, "'; name a file that can be written");
    out << make_trace_page(request);
    out.close();
    TESSERA_CHECK(out, UsageError, "cannot write all of '", given->file, "'");
    std::cout << given->file << '\n';
  });
}

}  // namespace tessera::cli
