#include "tessera/base/detail/text_file.h"
#include "tessera/cli/check_arguments.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/trace.h"

#include <iostream>
#include <memory>

namespace tessera::cli {

void add_trace_command(CLI::App& app) {
  struct TraceArguments {
    TraceRequest request;
    std::vector<std::string> passes;
    std::string file;
  };
  auto arguments = std::make_shared<TraceArguments>();
  auto* command =
      app.add_subcommand("trace", "Compile a train step and write an HTML page about passes, collectives and memory");
  auto& request = arguments->request;
  std::string modes = "Parallel mode:";
  for (const auto& mode : parallel_modes()) modes += std::string("\n  ") + mode.name + ": " + mode.help;
  command->add_option("--model", request.model, "Model: mlp, or a model name of tessera train")->capture_default_str();
  command->add_option("--parallel", request.parallel, modes)->capture_default_str();
  command->add_option("--ranks", request.ranks, "Number of ranks, as threads of one process")
      ->check(in_range(1, 64))
      ->capture_default_str();
  command->add_option("--passes", arguments->passes, "Comma-separated passes in order; see tessera opt --list")
      ->delimiter(',');
  command->add_option("--batch", request.batch, "Batch size per rank")->check(in_range(1, 4096))->capture_default_str();
  command->add_option("--seq", request.sequence, "Sequence length")->check(in_range(1, 65536))->capture_default_str();
  command->add_option("-o,--output", arguments->file, "Output file")->required();
  command->footer(
      "Example:\n  tessera trace --model gpt-tiny --parallel tp -o page.html\n"
      "Set TESSERA_TRACE_DIR to a folder to get such a page for every compilation of your own program.");
  command->callback([arguments, command] {
    auto request = arguments->request;
    if (command->count("--passes") > 0) request.passes = arguments->passes;
    write_text_file(arguments->file, make_trace_page(request));
    std::cout << arguments->file << '\n';
  });
}

}  // namespace tessera::cli
