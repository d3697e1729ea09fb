#pragma once
#include "tessera/rules/detail/rule.h"

#include <ATen/core/ivalue.h>

#include <iosfwd>
#include <string>
#include <vector>

// Tries what a rule says. For every row, 1 to 4 ranks and several ways of cutting, the oracle takes plain tensors apart
// as the row's inputs say, runs the op on each rank's part, puts the results together as its outputs say, and compares
// with the op on the whole. Sizes that do not divide and pieces without elements come with it. Then every two rows
// together on a mesh of 2 x 2, because each mesh axis chooses its row alone. Views are tried from every placement.
namespace tessera::testing {

// A call of an op with plain tensors. All tensors count as distributed, but for those of `plain_args`.
struct Sample {
  std::string op;
  std::vector<c10::IValue> args;
  std::vector<int> plain_args;
};

struct RuleReport {
  std::string op;
  int64_t rows = 0, cases = 0;     // tried
  int64_t kept = 0;                // of a view: cuts that were followed
  std::vector<std::string> wrong;  // "S(0), R -> S(0) on 3 ranks: element 2 of [5, 3]: want 1, got 2"
};

// `rule` null: the registered one. Fewer args than the schema has: the rest are its defaults.
RuleReport verify_rule(const Sample& sample, const rules::OpRule* rule = nullptr);
std::ostream& operator<<(std::ostream& out, const RuleReport& report);

// All samples of a family. Tells what is wrong, and which registered ops of it have no sample and are not `exempt`.
struct FamilyReport {
  std::string family;
  int64_t ops = 0, exempt = 0, rows = 0, cases = 0;
  std::vector<std::string> problems;
};
FamilyReport verify_family(const std::string& family, const std::vector<Sample>& samples,
                           const std::vector<std::string>& exempt = {});
std::ostream& operator<<(std::ostream& out, const FamilyReport& report);

// Ops of one family in the registry, sorted.
std::vector<std::string> ops_of_family(const std::string& family);

}  // namespace tessera::testing
