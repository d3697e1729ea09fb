#pragma once
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// What the compiler knows of an op beyond its schema. Only ops that need special treatment have a row; all others are
// OpKind::Plain.
enum class OpKind : uint8_t {
  Plain,
  Empty,       // allocates memory and does not write it
  Collective,  // results are in flight until a wait
  Wait,
  Random,  // draws random numbers: is never removed, merged or moved past another draw
  Check,   // throws if the program must not continue: is never removed
  Reads,   // returns a value to the host, or has a data-dependent output shape: cannot be compiled
};

struct OpRow {
  const char* name;  // "tessera.all_reduce"
  OpKind kind;
  const char* listed_as;  // name in program.listing(); null: its own name
};
const OpRow* row_of(const Node& node);
// The ops that program.listing() prints by this name.
std::vector<c10::OperatorHandle> ops_listed_as(const std::string& name);
OpKind kind_of(const c10::OperatorHandle& op);
inline OpKind kind_of(const Node& node) { return kind_of(node.op); }

// True if the op writes into this argument: according to its schema, or because it is known to where the schema is
// incomplete.
bool writes_argument(const c10::OperatorHandle& op, size_t argument);

// A pure op reads only its arguments and writes only its results. Two pure ops with equal arguments have equal results,
// and a pure op without users can be removed.
bool is_pure(const Node& node);
bool is_view(const Program& program, const Node& node);  // all results alias an argument, and nothing is written
int32_t group_of(const Node& node);                      // of a collective or a wait; -1: no group argument
bool is_generated(const Node& node);                     // calls a function of Program::kernels
const std::string& generated_name(const Node& node);     // the name of that function

}  // namespace tessera::compiler
