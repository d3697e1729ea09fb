#pragma once
#include "tessera/rules/detail/rule.h"

#include <ATen/core/ivalue.h>

#include <iosfwd>
#include <string>
#include <vector>

// Tests sharding rules by execution. For every strategy of a rule, on 1 to 4 ranks and for several kinds of shards, the
// oracle splits plain tensors by the input placements, runs the op on each rank's local tensors, combines the results
// by the output placements, and compares with the op on the full tensors. Sizes that do not divide and empty local
// tensors occur among these cases. It also tries every pair of strategies on a 2 x 2 mesh, because each mesh axis
// chooses its strategy independently. Views are tested with every placement.
namespace tessera::testing {

// A call of an op with plain tensors. All tensors count as distributed, except those of `plain_args`.
struct Sample {
  std::string op;                   // "aten::add.Tensor"
  std::vector<c10::IValue> args;    // missing trailing arguments get the schema's defaults
  std::vector<int> plain_args;      // indices of arguments that stay plain
  std::vector<size_t> states = {};  // results that are states of a random generator: not compared
};

// The result for one sample.
struct RuleReport {
  std::string op;                     // of the sample
  int64_t strategies = 0, cases = 0;  // number tested
  int64_t kept = 0;                   // of a view: number of shardings that the view kept
  std::vector<std::string> wrong;     // "S(0), R -> S(0) on 3 ranks: element 2 of [5, 3]: want 1, got 2"
};

// Tests `rule`, or the registered rule if null.
RuleReport verify_rule(const Sample& sample, const rules::OpRule* rule = nullptr);
// Prints the counts, then one line per wrong case.
std::ostream& operator<<(std::ostream& out, const RuleReport& report);

// The result for all samples of a family of rules.
struct FamilyReport {
  std::string family;                                      // "pointwise", "matmul", ...
  int64_t ops = 0, exempt = 0, strategies = 0, cases = 0;  // numbers tested
  std::vector<std::string> problems;                       // wrong cases, and ops without a sample that are not exempt
};
// Tests all samples, and that every op of the family has a sample or is `exempt`.
FamilyReport verify_family(const std::string& family, const std::vector<Sample>& samples,
                           const std::vector<std::string>& exempt = {});
// Prints the counts, then one line per problem.
std::ostream& operator<<(std::ostream& out, const FamilyReport& report);

// The registered ops of one family, sorted.
std::vector<std::string> ops_of_family(const std::string& family);

}  // namespace tessera::testing
