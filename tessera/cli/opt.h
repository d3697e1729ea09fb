#pragma once
#include <iosfwd>
#include <string>
#include <vector>

// `tessera opt`: runs compiler passes on a program in text form.
namespace tessera::cli {

struct OptRequest {
  std::vector<std::string> passes;  // in this order
  bool verify = false;              // verify the program after every pass
};

// Prints the transformed program to `out`, and per pass the number of matches and the time to `report`.
// Throws UsageError for an unknown pass and for text that is not a valid program.
void run_opt(const OptRequest& request, const std::string& text, std::ostream& out, std::ostream& report);

void list_passes(std::ostream& out);

}  // namespace tessera::cli
