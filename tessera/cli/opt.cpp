#include "tessera/cli/opt.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/passes/pass.h"

#include <iomanip>
#include <ostream>
#include <sstream>

namespace tessera::cli {
namespace {

constexpr int kNameWidth = 30;

std::string match_text(const compiler::Matched& matched) {
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
  try {  // passes need a valid program
    compiler::verify(program);
  } catch (const InternalError& error) {
    TESSERA_FAIL(UsageError, "invalid program: ", error.what_without_backtrace());
  }
  for (const auto& pass : compiler::run_passes(program, passes, request.verify)) {
    std::ostringstream took;
    took << std::fixed << std::setprecision(3) << pass.milliseconds << " ms";
    report << std::left << std::setw(kNameWidth) << pass.name << std::right << std::setw(12) << took.str() << "  "
           << match_text(pass.matched) << '\n';
  }
  compiler::renumber(program);
  out << program;
}

void list_passes(std::ostream& out) {
  for (const auto& pass : compiler::known_passes())
    out << std::left << std::setw(kNameWidth) << pass.name << pass.help << '\n';
}

}  // namespace tessera::cli
