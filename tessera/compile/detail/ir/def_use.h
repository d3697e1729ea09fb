#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <numeric>
#include <vector>

namespace tessera::compiler {

// Def-use information of a program: which node defines a value, which nodes use it, what happens to its buffer.
// It is a snapshot: build a new one after a rewrite.
struct DefUse {
  explicit DefUse(const Program& program);

  // By value.
  std::vector<int32_t> def_node;            // -1: an input
  std::vector<std::vector<int32_t>> users;  // nodes in program order, each once
  std::vector<char> is_output;
  // By buffer.
  std::vector<char> external;    // memory that the caller owns
  std::vector<char> has_output;  // an output aliases it
  std::vector<char> retained;    // an output other than a return value aliases it: a .grad or optimizer state keeps it
  std::vector<int32_t> writes;   // number of ops that write into it, without its definition and without waits

  const Node* def(const Program& program, ValueId id) const {
    const auto by = def_node[static_cast<size_t>(id)];
    return by < 0 ? nullptr : &program.nodes[static_cast<size_t>(by)];
  }
  // The only node that uses the value; -1 for zero or several users, or if the value is an output.
  int32_t only_user(ValueId id) const {
    const auto& all = users[static_cast<size_t>(id)];
    return all.size() == 1 && !is_output[static_cast<size_t>(id)] ? all[0] : -1;
  }
  // True if the program owns the buffer, no op writes to it after its definition, and nothing retains it.
  bool is_immutable(const Program& program, ValueId id) const {
    const auto b = static_cast<size_t>(program.buffer_of(id));
    return !external[b] && !retained[b] && writes[b] == 0;
  }
};

// True if the value is contiguous and covers its buffer from the first byte to the last.
bool covers_buffer(const Program& program, ValueId id, const std::vector<int64_t>& buffer_bytes);

// The constant in an argument; null if the argument is a value, a group or a runtime scalar.
const c10::IValue* constant_or_null(const Arg& arg);

// Is the argument the constant 1?
bool is_one(const Arg& arg);

// The node that allocates the memory of a value without writing it.
Node allocation_of(const Program& program, ValueId id);

int64_t group_size(const Program& program, int32_t group);

// The values of each buffer.
std::vector<std::vector<ValueId>> values_by_buffer(const Program& program);

// Replaces uses of values by other values (LLVM: replaceAllUsesWith).
//
//   ReplacedValues replaced(program);  replaced.set(%3, %1);  replaced.rewrite_reads(node);   // %3 becomes %1
class ReplacedValues {
 public:
  explicit ReplacedValues(const Program& program) : by_(program.values.size()) { std::iota(by_.begin(), by_.end(), 0); }
  void set(ValueId old, ValueId now) { by_[static_cast<size_t>(old)] = now; }
  // Values that were added to the program later are not replaced.
  ValueId operator()(ValueId id) const {
    return static_cast<size_t>(id) < by_.size() ? by_[static_cast<size_t>(id)] : id;
  }
  void rewrite_reads(Node& node) const {
    node.replace_reads([this](ValueId id) { return (*this)(id); });
  }
  void rewrite_outputs(Program& program) const;

 private:
  std::vector<ValueId> by_;
};

// Moves `views`, the values in the buffer of a value that `now` replaces, into the buffer of `now`.
void move_views(Program& program, const std::vector<ValueId>& views, ValueId now);

}  // namespace tessera::compiler
