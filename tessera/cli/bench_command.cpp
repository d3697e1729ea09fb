// The benches are a program of their own beside this one, so that nobody who trains has to wait until they are built.
#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/paths.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tessera::cli {

void add_bench_command(CLI::App& app) {
  auto* command = app.add_subcommand("bench", "Runs a benchmark and prints a table");
  command->set_help_flag();
  command->prefix_command();  // all that follows is the other program's
  command->callback([command] {
    const auto program = program_path().parent_path() / "tessera-bench";
    std::vector<std::string> words{"tessera bench"};
    for (const auto& word : command->remaining()) words.push_back(word);
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    execv(program.c_str(), argv.data());
    TESSERA_FAIL(UsageError, "the benches are the program ", program.string(),
                 ", which cannot be started: ", std::strerror(errno), "; `make build` makes it");
  });
}

}  // namespace tessera::cli
