#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/opt.h"

#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>

namespace tessera::cli {
namespace {

constexpr int kCannotRead = 2;

std::string read_text(const std::string& file) {
  if (file == "-") return std::string(std::istreambuf_iterator<char>(std::cin), {});
  std::ifstream in(file);
  std::ostringstream text;
  TESSERA_CHECK(in && text << in.rdbuf(), UsageError, "cannot read a program from '", file,
                "'; give a file with one, or - for standard input");
  return text.str();
}

}  // namespace

void add_opt_command(CLI::App& app) {
  struct Arguments {
    OptRequest request;
    std::string file;
    bool list = false;
  };
  auto given = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("opt", "Runs passes of the compiler on a program in text, and prints it");
  command->add_option("file", given->file, "The program; - for standard input");
  command->add_option("--pass", given->request.passes, "A pass to run; may be given several times, in order")
      ->allow_extra_args(false);
  command->add_flag("--verify", given->request.verify, "Check the program after every pass");
  command->add_flag("--list", given->list, "Print the passes and stop");
  command->footer(
      "Examples:\n  tessera opt --list\n  tessera opt --pass=fold_views --pass=dead_code --verify step.ir\n"
      "The program goes to standard output; what each pass matched and took, to standard error.");
  command->callback([given] {
    if (given->list) return list_passes(std::cout);
    try {
      TESSERA_CHECK(!given->file.empty(), UsageError, "opt needs a file with a program, or - for standard input");
      run_opt(given->request, read_text(given->file), std::cout, std::cerr);
    } catch (const UsageError& error) {
      std::cerr << "tessera: " << error.what_without_backtrace() << '\n';
      throw CLI::RuntimeError(kCannotRead);
    }
  });
}

}  // namespace tessera::cli
