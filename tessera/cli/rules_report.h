#pragma once
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

// The command `tessera rules`: which ops have sharding strategies, and what they are.
namespace tessera::cli {

// The overloads for which PyTorch's DTensor has a strategy, one per line (tools/pytorch_dtensor_ops.txt).
std::string_view pytorch_ops();

// How one overload runs on distributed tensors.
struct OpCoverage {
  enum class How { Rule, Kernel, Composite, Decomposed, Functional, Gathered, None, Absent };
  std::string op;      // "aten::add.Tensor"
  How how;             // a Functional form counts as the form that it runs: see `gathered`
  std::string detail;  // the family of the rule, the functional form, or the reason of a gather
  bool gathered;       // its only strategy is all-Replicate
};
std::string_view to_string(OpCoverage::How how);

OpCoverage coverage_of(const std::string& op);
std::vector<OpCoverage> coverage_of_list(std::string_view names);  // one name per line

// The numbers, then the gathered ops with their reasons and the ops without a strategy.
void print_coverage(const std::vector<OpCoverage>& ops, std::ostream& out);
void print_coverage_json(const std::vector<OpCoverage>& ops, std::ostream& out);
// The page docs/ops.md: the ops by route and family, then the strategies of example calls.
void print_coverage_markdown(const std::vector<OpCoverage>& ops, std::ostream& out);
// The ops without a strategy, and the gathered ones without a reason.
void print_missing(const std::vector<OpCoverage>& ops, bool json, std::ostream& out);

// A call as text: sizes for each tensor, then other arguments by name.
//   {"8x10", "10x4"} for aten::mm      {"5x3", "dim=[1]", "keepdim=true"} for aten::sum.dim_IntList
// "i5x3" has integers, "b5x3" booleans, "c5x3" complex numbers. "5x3:S(0)" has placements, which only explain reads.
// The strategies of the call over one mesh axis, one line each.
std::vector<std::string> strategies_of(const std::string& op, const std::vector<std::string>& call);
// Prints route, family, schema, and the strategies of the call if sizes are given.
void show_op(const std::string& op, const std::vector<std::string>& call, bool json, std::ostream& out);
// Tests all strategies of the call by brute force. Without a call: samples made from the schema. Without an op: all
// elementwise and foreach ops. Returns false if a strategy is wrong.
bool verify_op(const std::string& op, const std::vector<std::string>& call, bool json, std::ostream& out);
// The decision for a call on a mesh ("dp=2,tp=4"): candidates with costs. See debug/explain.h.
void explain_op(const std::string& op, const std::vector<std::string>& call, const std::string& mesh, bool json,
                std::ostream& out);

}  // namespace tessera::cli
