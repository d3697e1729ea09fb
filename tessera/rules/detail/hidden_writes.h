#pragma once
#include <string_view>
#include <vector>

// Ops that write to arguments without saying so: their schema has no alias annotation for these. Everything that reads
// schemas to find writes must add this table. tests/rules runs every op that has a rule, compares all arguments before
// and after, and fails for a write that neither the schema nor the table has.
namespace tessera::rules {

struct HiddenWrites {
  std::string_view op;    // "aten::native_batch_norm"
  std::vector<int> args;  // indices of the written arguments
  int only_if = -1;       // index of a bool argument: without it nothing is written; -1: always written
};

// The entry of an op, or null.
const HiddenWrites* hidden_writes(std::string_view op);

}  // namespace tessera::rules
