#pragma once
#include "tessera/compile/detail/api/result_leaves.h"
#include "tessera/compile/detail/trace/tracer.h"

#include <string>
#include <vector>

namespace tessera::compiler {

// A traced program in a form that can be compared with another trace of the same function: one line per op, with names
// for values that do not depend on the order of the inputs, and the double constants apart.
struct TraceText {
  struct Constant {
    size_t node, argument;
    double value;
  };
  std::vector<std::string> lines;  // of the nodes, of the outputs, of the numbers in the result
  std::vector<Constant> constants;

  TraceText() = default;
  TraceText(const Tracer::Result& traced, const ResultLeaves& returned);
};

// A constant of a trace that is a number of the call.
struct NumberUse {
  size_t node, argument;  // in the traced program; a node after its last one: number `argument` of the result
  size_t number;
  bool negated;
};

// The first op in which two traces differ: "op 3 is aten.mul(...), it was aten.mul(...)". "" if they are equal.
// `uses`: constants that are numbers of the call; in `now` they have the values `numbers`.
std::string difference(const TraceText& now, const TraceText& before, const std::vector<NumberUse>& uses,
                       const std::vector<double>& numbers);

// Compares a trace with two traces that had marks in place of numbers, one with positive and one with negative marks
// (tracing/detail/number_input.h). Appends the constants of `real` that are numbers. False if the traces differ in
// anything else.
bool find_number_uses(const TraceText& real, const TraceText& positive, const TraceText& negative,
                      const std::vector<double>& numbers, std::vector<NumberUse>& uses);

}  // namespace tessera::compiler
