#include "tessera/cli/exit_code.h"

#include "tessera/base/error.h"

namespace tessera::cli {

ExitCode exit_code_of(const std::exception& error) {
  if (dynamic_cast<const UsageError*>(&error) || dynamic_cast<const ShardingError*>(&error)) return ExitCode::Usage;
  return dynamic_cast<const InternalError*>(&error) ? ExitCode::Internal : ExitCode::Failure;
}

std::string error_text(const std::exception& error) {
  if (dynamic_cast<const InternalError*>(&error)) return c10::str("internal error, please report: ", error.what());
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  return c10_error ? c10_error->what_without_backtrace() : error.what();
}

}  // namespace tessera::cli
