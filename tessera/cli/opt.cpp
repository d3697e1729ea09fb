#include "tessera/cli/opt.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/passes/pass.h"

#include <iomanip>
#include <ostream>
#include <sstream>

namespace tessera::cli {
namespace {

constexpr int kNameWidth = 30;

std::string describe(const compiler::Matched& matched) {
  const auto times = matched.times == 0   ? "matched nothing"
                     : matched.times == 1 ? "matched once"
                                          : c10::str("matched ", matched.times, " times");
  return matched.note.empty() ? times : times + ": " + matched.note;
}

}  // namespace

void run_opt(const OptRequest& request, const std::string& text, std::ostream& out, std::ostream& report) {
  std::vector<compiler::Pass> passes;
  for (const auto& name : request.passes) passes.push_back(compiler::find_pass(name));
  auto program = compiler::parse(text);
  try {  // passes rely on it
    compiler::verify(program);
  } catch (const InternalError& error) {
    TESSERA_FAIL(UsageError, "as it was read: ", error.what_without_backtrace());
  }
  for (const auto& pass : compiler::run_passes(program, passes, request.verify)) {
    std::ostringstream took;
    took << std::fixed << std::setprecision(3) << pass.milliseconds << " ms";
    report << std::left << std::setw(kNameWidth) << pass.name << std::right << std::setw(12) << took.str() << "  "
           << describe(pass.matched) << '\n';
  }
  compiler::renumber(program);
  out << program;
}

void list_passes(std::ostream& out) {
  for (const auto& row : compiler::known_passes())
    out << std::left << std::setw(kNameWidth) << row.name << row.help << '\n';
}

}  // namespace tessera::cli
