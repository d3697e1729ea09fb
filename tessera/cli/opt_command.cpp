#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/opt.h"

#include <iostream>
#include <iterator>
#include <memory>

namespace tessera::cli {
namespace {

std::string read_text(const std::string& file) {
  if (file == "-") return std::string(std::istreambuf_iterator<char>(std::cin), {});
  return read_text_file(file, "the program");
}

}  // namespace

void add_opt_command(CLI::App& app) {
  struct OptArguments {
    OptRequest request;
    std::string file;
    bool list = false;
  };
  auto arguments = std::make_shared<OptArguments>();
  auto* command = app.add_subcommand("opt", "Run compiler passes on a program in text form and print the result");
  command->add_option("file", arguments->file, "File with the program, or - for standard input");
  command->add_option("--pass", arguments->request.passes, "Pass to run; repeat for several passes, in order")
      ->allow_extra_args(false);
  command->add_flag("--verify", arguments->request.verify, "Verify the program after every pass");
  command->add_flag("--list", arguments->list, "List the passes and exit");
  command->footer(
      "Examples:\n  tessera opt --list\n  tessera opt --pass=fold_views --pass=dead_code --verify step.ir\n"
      "Prints the program to standard output, and matches and time of each pass to standard error.");
  command->callback([arguments] {
    if (arguments->list) return list_passes(std::cout);
    TESSERA_CHECK(!arguments->file.empty(), UsageError, "opt needs a file with a program, or - for standard input");
    run_opt(arguments->request, read_text(arguments->file), std::cout, std::cerr);
  });
}

}  // namespace tessera::cli
