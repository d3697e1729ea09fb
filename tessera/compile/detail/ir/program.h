#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/compile/detail/ir/type.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <iosfwd>
#include <map>
#include <string>
#include <variant>
#include <vector>

// The IR of the compiler: a training step as a list of ops on numbered values, like the nodes of a torch.fx graph.
// Tracing produces it, passes rewrite it, replay runs it.
//
//   group @dp [0, 1]
//   input %0: f32[32, 50] parameter "net1.weight"
//   input %1: f32[128, 50] argument "0"
//   %2: f32[50, 32]{1, 50} in %0 = aten.t(%0)
//   %3: f32[128, 32] = aten.mm(%1, %2)
//   %4: f32[128, 32] = tessera.all_reduce(%3, "sum", @dp)
//   %5: f32[128, 32] in %4 = tessera.wait(%4!, @dp)
//   %6: f32[128, 32] in %5 = aten.relu_(%5!)
//   return %6
//
// Every value has one definition. "in %0": the value aliases the memory of %0. Views and in-place ops define such
// values; all values that alias one another share a buffer. "!": the op writes this argument. A value names memory, not
// contents: a read of %5 after relu_ reads what relu_ wrote. So an order of the nodes is valid if, for every buffer,
// writes keep their position among reads and other writes (dependencies.h).
//
// The schema in LibTorch's dispatcher defines an op's arguments, results, aliases and writes. What the compiler needs
// beyond the schema is in op_table.h.
namespace tessera::compiler {

using ValueId = int32_t;
inline constexpr ValueId kNone = -1;  // an undefined tensor

struct Value {
  Type type;
  int32_t buffer = -1;
  int64_t offset = 0;  // of the first element in the buffer, in elements of the dtype
  static constexpr int32_t kNoBatch = -1, kBatchReduced = -2;
  int32_t batch_dim = kNoBatch;  // set by pass batch_dims
  bool operator==(const Value&) const = default;
};

using ValueList = std::vector<ValueId>;

// A number that is read each time the program runs: a learning rate, an offset of the random generator.
struct RuntimeScalar {
  int32_t number = 0;  // index into Program::numbers
  bool negated = false;
  int64_t plus = 0;
  bool operator==(const RuntimeScalar&) const = default;
};
struct GroupName {
  int32_t group = 0;  // index into Program::groups
  bool operator==(const GroupName&) const = default;
};

// An argument or a result. Constants are numbers, strings, lists of these, or none. A number in place of a tensor is a
// wrapped number: it does not take part in type promotion, like the 2 in x * 2.
using Arg = std::variant<c10::IValue, ValueId, ValueList, RuntimeScalar, GroupName>;
bool same(const Arg& a, const Arg& b);

// kNone if the argument is not one value.
inline ValueId value_of(const Arg& arg) {
  const auto* id = std::get_if<ValueId>(&arg);
  return id ? *id : kNone;
}

// Calls f(value) for the values that are not kNone.
template <class F>
void each_value(const Arg& arg, const F& f) {
  if (const auto* value = std::get_if<ValueId>(&arg)) {
    if (*value != kNone) f(*value);
  } else if (const auto* list = std::get_if<ValueList>(&arg)) {
    for (const auto id : *list)
      if (id != kNone) f(id);
  }
}

struct Node {
  c10::OperatorHandle op;
  std::vector<Arg> args;
  std::vector<Arg> results;  // values, lists of values; a constant where the schema has no tensor
  std::string module = {};   // the module whose forward called the op

  const c10::FunctionSchema& schema() const { return op.schema(); }
  std::string name() const;  // "aten.add.Tensor"
  // Each calls f(value) for the values that are not kNone.
  template <class F>
  void each_read(const F& f) const {  // all arguments, written ones included
    for (const auto& arg : args) each_value(arg, f);
  }
  template <class F>
  void each_write(const F& f) const {  // arguments that are written
    for (size_t i = 0; i < args.size(); i++)
      if (writes(i)) each_value(args[i], f);
  }
  template <class F>
  void each_result(const F& f) const {
    for (const auto& result : results) each_value(result, f);
  }
  void replace_reads(const std::function<ValueId(ValueId)>& with);

 private:
  bool writes(size_t argument) const;
};
// Finds "aten.add.Tensor". Throws UsageError with the overloads that exist.
c10::OperatorHandle find_op(const std::string& name);

// Captured: a tensor that the step uses and that is not one of its arguments, parameters, buffers or states.
// Constant: computed once, never written.
enum class Role : uint8_t { Parameter, Buffer, State, Gradient, Argument, Captured, Constant };
std::ostream& operator<<(std::ostream& out, Role role);

struct Input {
  ValueId value = kNone;
  Role role = Role::Argument;
  std::string name;
  at::Tensor constant = {};  // the value of a constant; undefined if the program was parsed from text without it
};
// What the caller gets from a run, besides what the program writes into its inputs.
struct Output {
  enum class Kind : uint8_t {
    Return,
    Gradient,  // becomes .grad of parameter `name`
    Kept,      // stays alive after the step, for example new optimizer state
  };
  ValueId value = kNone;
  Kind kind = Kind::Return;
  std::string name = {};
};

struct GroupInfo {
  std::string name;
  std::vector<int64_t> ranks;
  comm::Group group = {};  // null in a program that was parsed from text
  int64_t rank = -1;       // this rank's index in the group, if `group` is null; -1: unknown
};

// The source of a runtime scalar.
struct Number {
  std::string name;  // "lr"
  std::function<c10::IValue()> read = {};
};

struct Program {
  std::vector<Value> values;
  int32_t buffers = 0;
  std::vector<GroupInfo> groups;
  std::vector<Number> numbers;
  std::vector<Input> inputs;
  std::vector<Node> nodes;
  std::vector<Output> outputs;
  std::map<std::string, std::string> kernels;  // generated functions that tessera.cpp_kernel calls: name -> C++ source

  const Value& operator[](ValueId id) const { return values[static_cast<size_t>(id)]; }
  int32_t buffer_of(ValueId id) const { return (*this)[id].buffer; }
  ValueId add(Type type);                                    // adds a value in a new buffer
  ValueId add_in(ValueId other, Type type, int64_t offset);  // adds a value in the buffer of `other`
  // By buffer: 1 if the caller owns it, which is so for the buffers of inputs.
  std::vector<char> external_buffers() const;
  // By buffer: the bytes it needs.
  std::vector<int64_t> buffer_bytes() const;
};

std::ostream& operator<<(std::ostream& out, const Program& program);
std::string text_of(const Program& program);
// Parses what << prints. Throws UsageError with line and word.
Program parse(const std::string& text);
// Checks the invariants of the IR. Throws InternalError with the wrong line: a use before the definition, a value that
// exceeds its buffer, arguments that do not match the schema, a write to a constant, a read of a collective's result
// before its wait.
void verify(const Program& program);
// Renumbers the values in order of definition and drops those without a definition.
void renumber(Program& program);

}  // namespace tessera::compiler
