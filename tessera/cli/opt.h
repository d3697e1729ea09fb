#pragma once
#include <iosfwd>
#include <string>
#include <vector>

// `tessera opt`: passes of the compiler on a program in text.
namespace tessera::cli {

struct OptRequest {
  std::vector<std::string> passes;  // in this order
  bool verify = false;              // after every pass, not only before the first
};

// Prints what becomes of the program on `out`, and a line for each pass on `report`: what it matched, how long it took.
// Throws UsageError for a pass that there is not, text that is no program, a program that cannot be right.
void run_opt(const OptRequest& request, const std::string& text, std::ostream& out, std::ostream& report);

void list_passes(std::ostream& out);

}  // namespace tessera::cli
