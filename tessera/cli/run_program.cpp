#include "tessera/cli/check_arguments.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/exit_code.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iostream>

namespace tessera::cli {

int run_program(CLI::App& app, int argc, char** argv) {
  auto code = ExitCode::Success;
  try {
    auto arguments = split_empty_values({argv + std::min(argc, 1), argv + argc});
    check_arguments(app, arguments);
    std::reverse(arguments.begin(), arguments.end());  // the order that CLI11 takes
    app.parse(std::move(arguments));
  } catch (const CLI::ParseError& error) {  // also --help and --version, for which exit() returns 0
    code = app.exit(error) == 0 ? ExitCode::Success : ExitCode::Usage;
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error_text(error) << '\n';
    code = exit_code_of(error);
  }
  errno = 0;
  if (!std::cout.flush() && code == ExitCode::Success) {  // as with > /dev/full
    std::cerr << "tessera: cannot write to standard output" << (errno ? ": " : "")
              << (errno ? std::strerror(errno) : "") << '\n';
    code = ExitCode::Failure;
  }
  return static_cast<int>(code);
}

}  // namespace tessera::cli
