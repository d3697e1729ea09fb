#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/constant_text.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/program.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <map>
#include <sstream>
#include <utility>

namespace tessera::compiler {
namespace {

// A cursor over one line of text.
class LineCursor {
 public:
  LineCursor(std::string_view text, int number) : text_(text), number_(number) {}

  bool at_end() {
    skip();
    return at_ >= text_.size() || text_[at_] == '#';
  }
  bool peek(std::string_view word) {
    skip();
    return text_.substr(at_, word.size()) == word;
  }
  bool take(std::string_view word) {
    if (!peek(word)) return false;
    at_ += word.size();
    return true;
  }
  void expect(std::string_view word) {
    if (!take(word)) fail(c10::str("\"", word, "\""));
  }
  [[noreturn]] void fail(const std::string& expected) {
    skip();
    TESSERA_FAIL(UsageError, "line ", number_, ", at \"", text_.substr(at_, 24), "\": expected ", expected);
  }
  std::string word() {
    skip();
    const auto begin = at_;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) || text_[at_] == '_' || text_[at_] == '.'))
      at_++;
    if (begin == at_) fail("a name");
    return std::string(text_.substr(begin, at_ - begin));
  }
  std::string name() {  // of a group or number: all characters up to the next blank or one of ,)]+
    skip();
    const auto begin = at_;
    while (at_ < text_.size() && !std::strchr(" ,)]+", text_[at_])) at_++;
    if (begin == at_) fail("a name");
    return std::string(text_.substr(begin, at_ - begin));
  }
  int64_t integer() {
    skip();
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (error != std::errc()) fail("an integer");
    at_ = static_cast<size_t>(end - text_.data());
    return value;
  }
  int64_t integer_in(int64_t least, int64_t most) {
    const auto value = integer();
    if (value < least || value > most) fail(c10::str("an integer from ", least, " to ", most, ", not ", value));
    return value;
  }
  c10::IValue number() {
    skip();
    const auto* begin = text_.data() + at_;
    const auto* limit = text_.data() + text_.size();
    int64_t integer = 0;
    double real = 0;
    const auto as_integer = std::from_chars(begin, limit, integer);
    const auto as_real = std::from_chars(begin, limit, real);
    if (as_real.ec != std::errc()) fail("a number");
    at_ = static_cast<size_t>(as_real.ptr - text_.data());
    return as_integer.ec == std::errc() && as_integer.ptr == as_real.ptr ? c10::IValue(integer) : c10::IValue(real);
  }
  std::string quoted() {
    expect("\"");
    std::string found;
    for (; at_ < text_.size() && text_[at_] != '"'; at_++) {
      const bool escaped = text_[at_] == '\\';
      if (escaped && ++at_ == text_.size()) break;
      found += escaped && text_[at_] == 'n' ? '\n' : text_[at_];
    }
    expect("\"");
    return found;
  }
  std::vector<int64_t> integers(std::string_view open, std::string_view close) {
    std::vector<int64_t> list;
    expect(open);
    while (!take(close)) {
      if (!list.empty()) expect(",");
      list.push_back(integer());
    }
    return list;
  }
  size_t count_arguments() {  // of the list in parentheses that follows
    skip();
    size_t commas = 0, depth = 0;
    bool any = false;
    for (size_t i = at_; i < text_.size(); i++) {
      const char c = text_[i];
      if (c == '"')
        for (i++; i < text_.size() && text_[i] != '"'; i++) i += text_[i] == '\\';
      if (c == '(' || c == '[') depth++;
      if ((c == ')' || c == ']') && --depth == 0) break;
      any |= depth > 0 && c != '(' && c != ' ';
      commas += depth == 1 && c == ',';
    }
    return any ? commas + 1 : 0;
  }
  std::string comment() {  // what follows #, to the end of the line
    skip();
    if (!take("#")) return "";
    skip();
    return std::string(text_.substr(std::exchange(at_, text_.size())));
  }

 private:
  void skip() {
    while (at_ < text_.size() && text_[at_] == ' ') at_++;
  }
  std::string_view text_;
  size_t at_ = 0;
  int number_;
};

constexpr int64_t kMostDims = 64;
constexpr int kDeepestList = 4;                          // schemas have lists of lists at most
constexpr int64_t kMostConstantSpan = int64_t{1} << 20;  // memory of a constant, whose elements are in the text

class Parser {
 public:
  Program run(const std::string& text) {
    std::istringstream in(text);
    std::string line;
    for (int number = 1; std::getline(in, line); number++) {
      LineCursor at(line, number);
      if (at.at_end()) continue;
      try {
        read(at);
        if (!at.at_end()) at.fail("the end of the line");
      } catch (const c10::Error& error) {  // errors of op names, dtypes and devices do not have the line number yet
        const std::string message = error.what_without_backtrace();
        if (message.starts_with("line ")) throw;
        TESSERA_FAIL(UsageError, "line ", number, ": ", message);
      }
    }
    return std::move(program_);
  }

 private:
  void read(LineCursor& at) {
    if (at.take("group @")) {
      auto name = new_name(at, program_.groups);
      program_.groups.push_back({std::move(name), at.integers("[", "]")});
      auto& group = program_.groups.back();
      if (at.take("rank ")) group.rank = at.integer_in(0, static_cast<int64_t>(group.ranks.size()) - 1);
    } else if (at.take("number $")) {
      program_.numbers.push_back({new_name(at, program_.numbers)});
    } else if (at.take("kernel ")) {
      auto name = at.word();
      if (!program_.kernels.emplace(name, at.quoted()).second)
        at.fail(c10::str("a new kernel; ", name, " is already declared above"));
    } else if (at.take("input ")) {
      const auto value = define(at);
      const auto role = role_named(at);
      program_.inputs.push_back({value, role, at.quoted()});
      if (at.take("=")) program_.inputs.back().constant = read_elements(at, program_[value].type);
    } else if (at.take("return ")) {
      read_output(at, Output::Kind::Return);
    } else if (at.take("gradient ")) {
      read_output(at, Output::Kind::Gradient);
    } else if (at.take("kept ")) {
      read_output(at, Output::Kind::Kept);
    } else {
      read_node(at);
    }
  }

  template <class Items>
  std::string new_name(LineCursor& at, const Items& items) {
    auto name = at.name();
    for (const auto& item : items)
      if (item.name == name) at.fail(c10::str("a new name; ", name, " is already declared above"));
    return name;
  }

  at::Tensor read_elements(LineCursor& at, const Type& type) {
    std::vector<double> elements;
    at.expect("[");
    while (!at.take("]")) {
      if (!elements.empty()) at.expect(",");
      const auto number = at.number();
      elements.push_back(number.toScalar().toDouble());
      if (number.isInt() && (number.toInt() > kMostExactInteger || number.toInt() < -kMostExactInteger))
        at.fail("an integer below 2^53");
    }
    if (static_cast<int64_t>(elements.size()) != type.numel()) at.fail(c10::str(type.numel(), " elements in the list"));
    if (type.span() > kMostConstantSpan)
      at.fail(c10::str("strides of at most ", kMostConstantSpan, " elements in all"));
    return constant_of(type, elements);
  }

  void read_output(LineCursor& at, Output::Kind kind) {
    const auto value = use(at);
    program_.outputs.push_back({value, kind, at.at_end() ? "" : at.quoted()});
  }

  void read_node(LineCursor& at) {
    std::vector<Arg> results;
    if (at.peek("%") || at.peek("[") || at.peek("undefined")) {
      do results.push_back(read_result(at));
      while (at.take(","));
      at.expect("=");
    }
    const auto name = at.word();
    const bool is_kernel = program_.kernels.count(name) > 0;  // listing() prints a call of a kernel by its name
    Node node{is_kernel ? find_op("tessera.cpp_kernel") : op_named(name, at.count_arguments()), {}, std::move(results)};
    at.expect("(");
    const auto& arguments = node.schema().arguments();
    while (!at.take(")")) {
      if (!node.args.empty()) at.expect(",");
      if (node.args.size() == arguments.size()) at.fail(c10::str("\")\": ", node.name(), " takes no more arguments"));
      node.args.push_back(read_arg(at, *arguments[node.args.size()].type()));
    }
    if (is_kernel) node.args.emplace_back(c10::IValue(name));
    if (node.args.size() != arguments.size()) at.fail(c10::str(arguments.size(), " arguments"));
    node.module = without_runs(at.comment());
    program_.nodes.push_back(std::move(node));
  }

  // listing() prints collectives by the names that PyTorch has for them; some are ops with different arguments.
  static c10::OperatorHandle op_named(const std::string& name, size_t arguments) {
    for (const auto& op : ops_listed_as(name))
      if (op.schema().arguments().size() == arguments) return op;
    return find_op(name);
  }

  // The module of a comment, without what listing() adds: "net1  # 128 bytes, ran 3".
  // No std::regex: it recurses for each character, so a long comment would overflow the stack.
  static std::string without_runs(const std::string& comment) {
    std::string_view rest = comment;
    const auto drop = [](std::string_view& text, std::string_view end) {
      const bool has = text.ends_with(end);
      if (has) text.remove_suffix(end.size());
      return has;
    };
    const auto drop_all = [](std::string_view& text, std::string_view characters) {
      const auto before = text.size();
      text = text.substr(0, text.find_last_not_of(characters) + 1);
      return text.size() < before;
    };
    constexpr std::string_view kDigits = "0123456789", kBlanks = " \t\n\v\f\r";
    if (!drop_all(rest, kDigits) || !drop(rest, "ran ")) return comment;
    if (auto bytes = rest; drop(bytes, " bytes, ") && drop_all(bytes, kDigits)) rest = bytes;
    if (!rest.empty() && !drop(rest, "# ")) return comment;
    drop_all(rest, kBlanks);
    return std::string(rest);
  }

  Arg read_result(LineCursor& at) {
    if (!at.take("[")) return at.take("undefined") ? Arg(kNone) : Arg(define(at));
    ValueList list;
    while (!at.take("]")) {
      if (!list.empty()) at.expect(",");
      list.push_back(at.take("undefined") ? kNone : define(at));
    }
    return list;
  }

  ValueId define(LineCursor& at) {
    at.expect("%");
    const auto name = at.integer();
    at.expect(":");
    auto type = read_type(at);
    auto batch_dim = Value::kNoBatch;
    if (at.take("batch "))
      batch_dim = at.take("reduced") ? Value::kBatchReduced : static_cast<int32_t>(at.integer_in(0, kMostDims));
    ValueId value;
    if (at.take("in ")) {
      const auto base = use(at);
      if (base == kNone) at.fail("a value that has memory, not undefined");
      value = program_.add_in(base, std::move(type), at.take("+") ? at.integer() : 0);
    } else {
      value = program_.add(std::move(type));
    }
    program_.values.back().batch_dim = batch_dim;
    if (!values_.emplace(name, value).second) at.fail(c10::str("a new value; %", name, " is already defined above"));
    return value;
  }

  static Type read_type(LineCursor& at) {
    const auto dtype = dtype_from(at.word());
    auto sizes = at.integers("[", "]");
    if (const auto error = sizes_error(dtype, sizes); !error.empty())
      at.fail(c10::str("the sizes of a tensor: ", error));
    auto type = Type::contiguous(dtype, std::move(sizes));
    if (at.peek("{")) type.strides = at.integers("{", "}");
    if (const auto error = type_error(type); !error.empty()) at.fail(c10::str("the strides of a tensor: ", error));
    if (at.take("cuda:"))
      type.device = c10::Device(
          c10::kCUDA, static_cast<c10::DeviceIndex>(at.integer_in(0, std::numeric_limits<c10::DeviceIndex>::max())));
    if (at.peek("conj") && !c10::isComplexType(dtype)) at.fail("a complex dtype before conj");
    type.conj = at.take("conj");
    type.neg = at.take("neg");
    return type;
  }

  ValueId use(LineCursor& at) {
    if (at.take("undefined")) return kNone;
    at.expect("%");
    const auto name = at.integer();
    const auto found = values_.find(name);
    if (found == values_.end()) at.fail(c10::str("a value that is defined above; %", name, " is not"));
    at.take("!");
    return found->second;
  }

  Role role_named(LineCursor& at) {
    const auto word = at.word();
    for (int role = 0; role <= static_cast<int>(Role::Constant); role++)
      if (c10::str(static_cast<Role>(role)) == word) return static_cast<Role>(role);
    at.fail("parameter, buffer, state, gradient, argument, captured or constant");
  }

  template <class Items>
  int32_t index_of(LineCursor& at, const Items& items, const char* what) {
    const auto name = at.name();
    for (size_t i = 0; i < items.size(); i++)
      if (items[i].name == name) return static_cast<int32_t>(i);
    at.fail(c10::str("a ", what, " that is declared above; ", name, " is not"));
  }

  Arg read_runtime_scalar(LineCursor& at, bool negated) {
    const auto number = index_of(at, program_.numbers, "number");
    return RuntimeScalar{number, negated, at.take("+") ? at.integer() : 0};
  }

  Arg read_arg(LineCursor& at, const c10::Type& type) {
    if (at.peek("%") || at.peek("undefined")) return use(at);
    if (at.take("@")) return GroupName{index_of(at, program_.groups, "group")};
    if (at.take("$")) return read_runtime_scalar(at, false);
    if (at.take("-$")) return read_runtime_scalar(at, true);
    if (at.peek("[") && contains_tensors(type)) {
      ValueList list;
      at.expect("[");
      while (!at.take("]")) {
        if (!list.empty()) at.expect(",");
        list.push_back(use(at));
      }
      return list;
    }
    return read_constant(at, type);
  }

  static bool contains_tensors(const c10::Type& type) {
    if (type.kind() == c10::TypeKind::TensorType) return true;
    for (const auto& inner : type.containedTypes())
      if (contains_tensors(*inner)) return true;
    return false;
  }

  // A list with the element type that unboxing of the op's argument requires.
  static c10::IValue list_of(const std::vector<c10::IValue>& items, const c10::Type& type) {
    const auto* list = &type;
    if (type.kind() == c10::TypeKind::OptionalType) list = type.containedTypes()[0].get();
    auto element = list->kind() == c10::TypeKind::ListType ? list->containedTypes()[0] : c10::AnyType::get();
    if (element->kind() == c10::TypeKind::SymIntType) element = c10::IntType::get();
    c10::impl::GenericList list_value(element);
    for (const auto& item : items)
      list_value.push_back(element->kind() == c10::TypeKind::FloatType && item.isInt()
                               ? c10::IValue(static_cast<double>(item.toInt()))
                               : item);
    return c10::IValue(std::move(list_value));
  }

  c10::IValue read_constant(LineCursor& at, const c10::Type& type, int depth = 0) {
    if (at.take("none")) return {};
    if (at.take("true")) return true;
    if (at.take("false")) return false;
    if (at.take("generator")) return at::detail::createCPUGenerator();  // a program as text does not have the original
    if (at.peek("\"")) return at.quoted();
    if (at.take("device(")) {
      c10::Device device(at.quoted());
      at.expect(")");
      return device;
    }
    if (at.take("complex(")) {
      const auto real = at.number().toScalar().toDouble();
      at.expect(",");
      const auto imaginary = at.number().toScalar().toDouble();
      at.expect(")");
      return c10::complex<double>(real, imaginary);
    }
    if (at.take("[")) {
      if (depth == kDeepestList) at.fail(c10::str("a list of at most ", kDeepestList, " levels"));
      std::vector<c10::IValue> items;
      while (!at.take("]")) {
        if (!items.empty()) at.expect(",");
        items.push_back(read_constant(at, type, depth + 1));
      }
      return list_of(items, type);
    }
    auto number = at.number();
    return number.isInt() && wants_float(type) ? c10::IValue(static_cast<double>(number.toInt())) : number;
  }

  static bool wants_float(const c10::Type& type) {
    if (type.kind() == c10::TypeKind::OptionalType) return wants_float(*type.containedTypes()[0]);
    return type.kind() == c10::TypeKind::FloatType;
  }

  Program program_;
  std::map<int64_t, ValueId> values_;
};

}  // namespace

Program parse(const std::string& text) { return Parser().run(text); }

}  // namespace tessera::compiler
