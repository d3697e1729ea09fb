#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <functional>
#include <iosfwd>
#include <map>
#include <string>
#include <vector>

// Passes rewrite a program; each is a file of this folder, named as the pass is.
namespace tessera::compiler {

// What a pass did: how often it matched, and a word more for the report.
struct Matched {
  int64_t times = 0;
  std::string note = {};
};

struct Pass {
  std::string name;  // with its settings, as it was asked for
  std::function<Matched(Program&)> run;
  bool reorders = false;  // moves communication: not run where CompileOptions::reorder is off
};

// One line of the report of a pipeline.
struct PassReport {
  std::string name;
  Matched matched;
  double milliseconds = 0;
};
std::ostream& operator<<(std::ostream& out, const PassReport& report);
std::ostream& operator<<(std::ostream& out, const std::vector<PassReport>& report);  // a line each

// Numbers that a pass is given by name: "merge_collectives(bytes=26214400)". Those not given are as its row says.
using PassSettings = std::map<std::string, int64_t>;

// A pass as it is written: with settings, or without.
class PassFunction {
 public:
  PassFunction(Matched (*plain)(Program&)) : plain_(plain) {}                    // NOLINT(google-explicit-constructor)
  PassFunction(Matched (*with)(Program&, const PassSettings&)) : with_(with) {}  // NOLINT(google-explicit-constructor)
  Matched operator()(Program& program, const PassSettings& settings) const {
    return plain_ ? plain_(program) : with_(program, settings);
  }

 private:
  Matched (*plain_)(Program&) = nullptr;
  Matched (*with_)(Program&, const PassSettings&) = nullptr;
};

// Passes by name, with what each does in a line, in the order in which they are best run.
struct PassRow {
  const char* name;
  const char* help;
  PassFunction run;
  PassSettings settings = {};  // that it knows, and what they are if not given
  bool reorders = false;
};
const std::vector<PassRow>& known_passes();
// "name" or "name(key=value, key=value)". UsageError names the passes, or the settings, that there are.
Pass find_pass(const std::string& text);

// Runs passes in order. `verified`: checks the program after each.
std::vector<PassReport> run_passes(Program& program, const std::vector<Pass>& passes, bool verified);

}  // namespace tessera::compiler
