#include "tessera/base/detail/settings.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/paths.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/backend_choice.h"
#include "tessera/comm/environment.h"
#include "tessera/version.h"

#include <torch/headeronly/version.h>

#include <iomanip>
#include <iostream>
#include <string_view>

namespace tessera::cli {
namespace {

void print_env(std::ostream& out) {
  out << "Tessera   " TESSERA_VERSION "\n"
      << "LibTorch  " << TORCH_VERSION << " in " << libtorch_path().string() << "\n"
      << "Launcher  " << comm::read_environment() << "\n\nSettings\n";
  for (const Setting& s : all_settings()) {
    const bool is_set = setting_is_set(s.name);
    const bool is_secret = s.name == std::string_view("TESSERA_JOB_SECRET");
    const std::string value = is_secret && is_set ? "(set)" : setting(s.name);
    out << "  " << std::left << std::setw(29) << s.name << std::setw(14) << (value.empty() ? "-" : value)
        << (is_set ? " environment  " : " default      ") << s.help << '\n';
  }
  out << "\nBackends\n";
  for (const auto& backend : comm::backends())
    out << "  " << std::left << std::setw(29) << backend.name << std::setw(15)
        << (backend.available() ? "available" : "not available") << backend.help << '\n';
  out << "\nBackend 'auto', by process group\n";
  for (const auto& row : comm::auto_choices())
    out << "  " << std::left << std::setw(22) << row.ranks << row.choice << '\n';
}

}  // namespace

void add_env_command(CLI::App& app) {
  auto* command = app.add_subcommand("env", "Show versions, launcher, settings and backends");
  command->callback([] { print_env(std::cout); });
}

}  // namespace tessera::cli
