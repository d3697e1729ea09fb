#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <vector>

namespace tessera::compiler {

// Who makes and who reads what, in the program as it is now. A pass that has rewritten something makes it anew.
struct Uses {
  explicit Uses(const Program& program);

  // By value.
  std::vector<int32_t> made_by;               // node; -1: an input
  std::vector<std::vector<int32_t>> readers;  // nodes in order, each once
  std::vector<char> put_out;
  // By buffer.
  std::vector<char> external;   // memory from outside
  std::vector<char> seen;       // an output lies in it
  std::vector<char> bound;      // ... that is not returned: somebody holds that very memory
  std::vector<int32_t> writes;  // ops that write into it; not the one that makes it, not waits

  const Node* maker(const Program& program, ValueId id) const {
    const auto by = made_by[static_cast<size_t>(id)];
    return by < 0 ? nullptr : &program.nodes[static_cast<size_t>(by)];
  }
  // The one node that reads it, if it is not put out; -1: there is none, or several.
  int32_t only_reader(ValueId id) const {
    const auto& all = readers[static_cast<size_t>(id)];
    return all.size() == 1 && !put_out[static_cast<size_t>(id)] ? all[0] : -1;
  }
  // Is it memory of the program's own that nothing writes to once it is made, and that nobody holds?
  bool is_settled(const Program& program, ValueId id) const {
    const auto b = static_cast<size_t>(program.buffer_of(id));
    return !external[b] && !bound[b] && writes[b] == 0;
  }
};

// Does the value cover its buffer, without gaps, from the beginning?
bool is_whole(const Program& program, ValueId id, const std::vector<int64_t>& buffer_bytes);

// A number among the arguments; none if it is a value, or live.
const c10::IValue* constant_in(const Arg& arg);

// The group's size.
int64_t size_of_group(const Program& program, int32_t group);

}  // namespace tessera::compiler
