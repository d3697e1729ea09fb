#include "tessera/base/error.h"
#include "tessera/cli/commands.h"

#include <iostream>
#include <string_view>

namespace tessera::cli {

int run_program(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code != 0 && argc > 1 && std::string_view(argv[1]) == "train" ? 2 : code;
  } catch (const InternalError& error) {
    std::cerr << "tessera: this is a bug of ours: " << error.what() << '\n';
    return 2;
  } catch (const c10::Error& error) {
    std::cerr << "tessera: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << '\n';
    return 1;
  }
}

}  // namespace tessera::cli
