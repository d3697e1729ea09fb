#pragma once
#include "tessera/comm/world.h"

#include <c10/core/Device.h>

#include <iosfwd>
#include <string>
#include <vector>

// What `tessera selftest` runs on the ranks of one world: every collective, every link, every parallelism.
namespace tessera::cli {

// The result of one check, the same on all ranks.
struct SelftestResult {
  std::string name;
  std::string error;  // "" if it passed; names ranks
  double ms = 0;      // of the slowest rank
};

// Faults to plant, for tests of the test.
struct SelftestFaults {
  int64_t wrong_rank = -1;               // sends a wrong value
  int64_t slow_from = -1, slow_to = -1;  // a link with 50 ms of delay
};
// Parses "wrong:2", "slow:1-2" and "wrong:2,slow:1-2". Throws UsageError for other text.
SelftestFaults parse_selftest_fault(const std::string& text);

// Runs all checks. All ranks call it.
std::vector<SelftestResult> run_selftest(const World& world, at::Device device, const SelftestFaults& faults = {});

// Prints one line per check. Returns whether all passed.
bool print_selftest(std::ostream& out, const std::string& title, const std::vector<SelftestResult>& results);

}  // namespace tessera::cli
