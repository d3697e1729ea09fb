#include "tessera/cli/commands.h"
#include "tessera/cli/exit_code.h"

#include <iostream>

namespace tessera::cli {

int run_program(CLI::App& app, int argc, char** argv) {
  auto code = ExitCode::Success;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {  // also --help and --version, for which exit() returns 0
    code = app.exit(error) == 0 ? ExitCode::Success : ExitCode::Usage;
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error_text(error) << '\n';
    code = exit_code_of(error);
  }
  return static_cast<int>(code);
}

}  // namespace tessera::cli
