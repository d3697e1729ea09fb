// The table of a pipeline schedule: print and parse give the same table.
#include "tessera/base/error.h"
#include "tessera/pipelining/detail/action_table.h"

#include "fuzz_targets.h"

namespace tessera::fuzz {

void fuzz_schedule(std::string_view input) {
  pipelining::ActionTable table;
  try {
    table = pipelining::parse_csv(input);
  } catch (const UsageError&) {
    return;
  }
  const auto text = pipelining::to_csv(table);
  require(pipelining::parse_csv(text) == table, "print and parse give another table: ", text);
}

}  // namespace tessera::fuzz
