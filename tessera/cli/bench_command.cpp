// `tessera bench` executes the program tessera-bench. The benchmarks are separate so that `make train` need not build
// them.
#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/paths.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tessera::cli {

void add_bench_command(CLI::App& app) {
  auto* command = app.add_subcommand("bench", "Run a benchmark and print a table");
  command->set_help_flag();
  command->prefix_command();  // passes all further arguments on
  command->callback([command] {
    const auto program = program_path().parent_path() / "tessera-bench";
    std::vector<std::string> arguments{"tessera bench"};
    for (const auto& argument : command->remaining()) arguments.push_back(argument);
    std::vector<char*> argv;
    for (auto& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    execv(program.c_str(), argv.data());
    TESSERA_FAIL(UsageError, "cannot start the program ", program.string(), ": ", std::strerror(errno),
                 "; build it with `make build`");
  });
}

}  // namespace tessera::cli
