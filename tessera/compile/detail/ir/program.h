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

// A step as a list of ops on named values: what tracing gives, passes rewrite and replay runs.
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
// Every value is defined once. "in %0": the value lies in the memory of %0, which is what a view, and what an op that
// writes into an argument, gives; all values that lie in one another share a buffer. "!": the op writes there. A value
// means the memory it names, when the op runs: reading %5 after relu_ reads what relu_ wrote. So an order is right if
// for every buffer writes stay where they are among reads and writes (dependencies.h).
//
// What an op takes, gives, aliases and writes is its schema in LibTorch's dispatcher; what the compiler wants to know
// beyond that is a row of op_table.h.
namespace tessera::compiler {

using ValueId = int32_t;
inline constexpr ValueId kNone = -1;  // an undefined tensor

struct Value {
  Type type;
  int32_t buffer = -1;
  int64_t offset = 0;  // of its first element in the buffer, in elements of its dtype
  static constexpr int32_t kNoBatch = -1, kBatchReduced = -2;
  int32_t batch_dim = kNoBatch;  // as pass batch_dims has found
  bool operator==(const Value&) const = default;
};

using ValueList = std::vector<ValueId>;

// A number that is read when the program runs: a learning rate, the place in a random stream.
struct Live {
  int32_t number = 0;  // of Program::numbers
  bool negated = false;
  int64_t plus = 0;
  bool operator==(const Live&) const = default;
};
struct GroupName {
  int32_t group = 0;  // of Program::groups
  bool operator==(const GroupName&) const = default;
};

// An argument or a result. Constants are numbers, strings, lists of them, none; a number where a tensor is wanted is a
// number that does not take part in type promotion, as 2 in x * 2.
using Arg = std::variant<c10::IValue, ValueId, ValueList, Live, GroupName>;
bool same(const Arg& a, const Arg& b);

struct Node {
  c10::OperatorHandle op;
  std::vector<Arg> args;
  std::vector<Arg> results;  // values, lists of values; a constant where the schema has no tensor
  std::string module = {};   // that ran it

  const c10::FunctionSchema& schema() const { return op.schema(); }
  std::string name() const;  // "aten.add.Tensor"
  // Calls f(value) for each that is not kNone.
  void each_read(const std::function<void(ValueId)>& f) const;   // arguments, written ones too
  void each_write(const std::function<void(ValueId)>& f) const;  // arguments that are written
  void each_result(const std::function<void(ValueId)>& f) const;
  void replace_reads(const std::function<ValueId(ValueId)>& with);
};
c10::OperatorHandle find_op(const std::string& name);  // "aten.add.Tensor"; UsageError names ones like it

// Captured: memory that the step uses and nobody gave it as an argument. Constant: computed once, never written.
enum class Role : uint8_t { Parameter, Buffer, State, Gradient, Argument, Captured, Constant };
std::ostream& operator<<(std::ostream& out, Role role);

struct Input {
  ValueId value = kNone;
  Role role = Role::Argument;
  std::string name;
  at::Tensor constant = {};  // of a constant: what it is. Undefined: the program was read from a text that did not say
};
// What is seen outside when the program has run, beside what it wrote into inputs.
struct Output {
  enum class Kind : uint8_t {
    Return,
    Gradient,  // becomes .grad of parameter `name`
    Kept,      // somebody has kept it: state that an optimizer made, say
  };
  ValueId value = kNone;
  Kind kind = Kind::Return;
  std::string name = {};
};

struct GroupInfo {
  std::string name;
  std::vector<int64_t> ranks;
  comm::Group group = {};  // null in a program that was read from text
  int64_t rank = -1;       // this rank's place in it, where there is no group to say so; -1: not known
};

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
  // A value in memory of its own; in that of another.
  ValueId add(Type type);
  ValueId add_in(ValueId other, Type type, int64_t offset);
  // Which buffers hold memory from outside: those of inputs.
  std::vector<char> external_buffers() const;
  // Bytes that each buffer needs.
  std::vector<int64_t> buffer_bytes() const;
};

std::ostream& operator<<(std::ostream& out, const Program& program);
std::string text_of(const Program& program);
// Reads what << writes. UsageError names line and word.
Program parse(const std::string& text);
// InternalError with the line that is wrong: a value used before it is there, a result whose type cannot lie where it
// says it does, arguments that are not the schema's, a write to a constant, a collective's result read before a wait.
void verify(const Program& program);
// Numbers values by their place in the text, and drops those that nothing defines.
void renumber(Program& program);

}  // namespace tessera::compiler
