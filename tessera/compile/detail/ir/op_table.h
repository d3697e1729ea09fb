#pragma once
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// What the compiler knows of an op beyond its schema: a row for each op that it treats in a way of its own. Ops without
// a row are called as they are.
enum class OpKind : uint8_t {
  Plain,
  Empty,       // makes memory, writes nothing
  Collective,  // its results are pending until a wait
  Wait,
  Random,  // draws: never dropped, merged or moved past another
  Reads,   // gives a number to the host, or a shape that depends on values: cannot be compiled
};

struct OpRow {
  const char* name;  // "tessera.all_reduce"
  OpKind kind;
  const char* listed_as;  // in program.listing(); null: by its name
};
const OpRow* row_of(const Node& node);
OpKind kind_of(const c10::OperatorHandle& op);
inline OpKind kind_of(const Node& node) { return kind_of(node.op); }

// Does the op write into this argument? As its schema says, or, where that does not, as it is known to.
bool writes_argument(const c10::OperatorHandle& op, size_t argument);

// Reads nothing but its arguments and writes nothing but its results: two with the same arguments give the same, and
// one whose results nobody reads can go.
bool is_pure(const Node& node);
bool is_view(const Program& program, const Node& node);  // gives its argument's memory, and writes nothing
int32_t group_of(const Node& node);                      // of a collective or a wait; -1: none
bool is_generated(const Node& node);                     // calls a function of Program::kernels
const std::string& generated_name(const Node& node);     // of which

}  // namespace tessera::compiler
