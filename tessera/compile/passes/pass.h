#pragma once
#include "tessera/compile/ir/program.h"

#include <functional>
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
  std::string name;
  std::function<Matched(Program&)> run;
};

// One line of the report of a pipeline.
struct PassReport {
  std::string name;
  Matched matched;
  double milliseconds = 0;
};

// Passes by name, with what each does in a line, in the order in which they are best run.
struct PassRow {
  const char* name;
  const char* help;
  Matched (*run)(Program&);
};
const std::vector<PassRow>& known_passes();
Pass find_pass(const std::string& name);  // UsageError names the ones there are

// Runs passes in order. `verified`: checks the program after each.
std::vector<PassReport> run_passes(Program& program, const std::vector<Pass>& passes, bool verified);

}  // namespace tessera::compiler
