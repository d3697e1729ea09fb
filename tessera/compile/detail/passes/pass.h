#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <functional>
#include <iosfwd>
#include <map>
#include <string>
#include <vector>

// A pass rewrites a program. Each pass is in the file of this folder that has its name.
namespace tessera::compiler {

// The result of a pass: the number of rewrites, and a note for the report.
struct Matched {
  int64_t times = 0;
  std::string note = {};
};

struct Pass {
  std::string name;  // with its settings, as the user wrote it
  std::function<Matched(Program&)> run;
  bool reorders = false;  // moves communication: is skipped if CompileOptions::reorder is false
};

// One line of the report of run_passes.
struct PassReport {
  std::string name;
  Matched matched;
  double milliseconds = 0;
};
std::ostream& operator<<(std::ostream& out, const PassReport& report);
std::ostream& operator<<(std::ostream& out, const std::vector<PassReport>& report);  // one line per pass

// Settings of a pass by name: "merge_collectives(bytes=26214400)". The others have the defaults of its PassInfo.
using PassSettings = std::map<std::string, int64_t>;

// The function of a pass, with or without settings.
class PassFunction {
 public:
  PassFunction(Matched (*without)(Program&)) : without_(without) {}              // NOLINT(google-explicit-constructor)
  PassFunction(Matched (*with)(Program&, const PassSettings&)) : with_(with) {}  // NOLINT(google-explicit-constructor)
  Matched operator()(Program& program, const PassSettings& settings) const {
    return without_ ? without_(program) : with_(program, settings);
  }

 private:
  Matched (*without_)(Program&) = nullptr;
  Matched (*with_)(Program&, const PassSettings&) = nullptr;
};

// All passes in the recommended order, each with a line of help.
struct PassInfo {
  const char* name;
  const char* help;
  PassFunction run;
  PassSettings settings = {};  // names and defaults
  bool reorders = false;
  bool is_fast_only = false;  // for Numerics::Fast: results have other bits than in eager mode
};
const std::vector<PassInfo>& known_passes();
// Parses "name" or "name(key=value, key=value)". UsageError lists the passes, or the settings, that exist.
Pass find_pass(const std::string& text);

// Runs passes in order. `verified`: calls verify() after each.
std::vector<PassReport> run_passes(Program& program, const std::vector<Pass>& passes, bool verified);

}  // namespace tessera::compiler
