#include "tessera/checkpoint/detail/pickle.h"

#include "tessera/base/error.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <unordered_map>

namespace tessera::dcp {
namespace {

// The classes and functions of PyTorch's checkpoints. Names of dtypes and storages are checked by kTorchNames.
constexpr std::string_view kAllowedGlobals[] = {
    "collections OrderedDict",
    "pathlib PosixPath",
    "pathlib._local PosixPath",
    "torch Size",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch.distributed._shard.sharded_tensor.metadata MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata TensorProperties",
    "torch.distributed.checkpoint.filesystem _StorageInfo",
    "torch.distributed.checkpoint.metadata BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata Metadata",
    "torch.distributed.checkpoint.metadata MetadataIndex",
    "torch.distributed.checkpoint.metadata StorageMeta",
    "torch.distributed.checkpoint.metadata TensorProperties",
    "torch.distributed.checkpoint.metadata TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING",
    "torch.serialization _get_layout",
    "torch.storage UntypedStorage",
};
// torch.float32, torch.FloatStorage and so on: plain names, nothing that can be called for an effect.
constexpr std::string_view kTorchNames[] = {"bfloat16",
                                            "bool",
                                            "float16",
                                            "float32",
                                            "float64",
                                            "float8_e4m3fn",
                                            "float8_e5m2",
                                            "int16",
                                            "int32",
                                            "int64",
                                            "int8",
                                            "uint16",
                                            "uint32",
                                            "uint64",
                                            "uint8",
                                            "strided",
                                            "preserve_format",
                                            "contiguous_format"};

bool is_allowed(const std::string& name) {
  if (std::find(std::begin(kAllowedGlobals), std::end(kAllowedGlobals), name) != std::end(kAllowedGlobals)) return true;
  constexpr std::string_view torch = "torch ";
  if (!name.starts_with(torch)) return false;
  const auto rest = std::string_view(name).substr(torch.size());
  return rest.ends_with("Storage") ||
         std::find(std::begin(kTorchNames), std::end(kTorchNames), rest) != std::end(kTorchNames);
}

constexpr size_t kMaxValues = 50'000'000;  // of one pickle; each opcode makes at most one

const char* kind_name(PickleValue::Kind kind) {
  using Kind = PickleValue::Kind;
  switch (kind) {
    case Kind::None:
      return "None";
    case Kind::Bool:
      return "a bool";
    case Kind::Int:
      return "an int";
    case Kind::Real:
      return "a float";
    case Kind::Text:
      return "a str";
    case Kind::Tuple:
      return "a tuple";
    case Kind::List:
      return "a list";
    case Kind::Dict:
      return "a dict";
    case Kind::Global:
      return "a class or function";
    case Kind::Call:
      return "the result of a call";
    case Kind::Object:
      return "an object";
    case Kind::PersistentId:
      return "a persistent id";
  }
  return "";
}

}  // namespace

int64_t PickleValue::integer() const {
  TESSERA_CHECK(kind == Kind::Int, UsageError, "an int is expected, and ", kind_name(kind), " found");
  return number;
}

const std::string& PickleValue::string() const {
  TESSERA_CHECK(kind == Kind::Text, UsageError, "a str is expected, and ", kind_name(kind), " found");
  return text;
}

const PickleValue& PickleValue::item(size_t i) const {
  TESSERA_CHECK(i < items.size(), UsageError, kind_name(kind), " has ", items.size(), " items, and item ", i,
                " is expected");
  return *items[i];
}

const PickleValue* PickleValue::find(std::string_view key) const {
  TESSERA_CHECK(kind == Kind::Dict, UsageError, "a dict is expected, and ", kind_name(kind), " found");
  for (size_t i = items.size(); i >= 2; i -= 2)  // the last one of a key wins
    if (items[i - 2]->kind == Kind::Text && items[i - 2]->text == key) return items[i - 1];
  return nullptr;
}

const PickleValue& PickleValue::attribute(std::string_view name) const {
  TESSERA_CHECK(kind == Kind::Object && items.size() == 2, UsageError, "an object with attribute '", name,
                "' is expected, and ", kind_name(kind), " found");
  const auto* found = items[1]->find(name);
  TESSERA_CHECK(found, UsageError, "an object of ", items[0]->text, " has no attribute '", name, "'");
  return *found;
}

// The stack machine of pickle. https://docs.python.org/3/library/pickletools.html has the opcodes.
class PickleParser {
 public:
  explicit PickleParser(std::string_view bytes) : bytes_(bytes) {}

  Pickle run() {
    while (step()) {
    }
    TESSERA_CHECK(stack_.size() == 1, UsageError, "the pickle leaves ", stack_.size(), " values");
    pickle_.root_ = stack_.front();
    return std::move(pickle_);
  }

 private:
  using Kind = PickleValue::Kind;

  PickleValue* make(Kind kind) {
    TESSERA_CHECK(pickle_.values_.size() < kMaxValues, UsageError, "the pickle has more than ", kMaxValues, " values");
    pickle_.values_.push_back(std::make_unique<PickleValue>());
    pickle_.values_.back()->kind = kind;
    return pickle_.values_.back().get();
  }
  std::string_view take(uint64_t count) {
    TESSERA_CHECK(count <= bytes_.size() - at_, UsageError, "the pickle ends at byte ", bytes_.size(), ", and ", count,
                  " bytes are expected after byte ", at_);
    at_ += count;
    return bytes_.substr(at_ - count, count);
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view line() {
    const auto end = bytes_.find('\n', at_);
    TESSERA_CHECK(end != bytes_.npos, UsageError, "a line of the pickle does not end");
    const auto text = take(end - at_);
    take(1);
    return text;
  }
  PickleValue* pop() {
    TESSERA_CHECK(stack_.size() > (marks_.empty() ? 0 : marks_.back()), UsageError, "opcode at byte ", at_ - 1,
                  " finds no value on the stack");
    auto* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  std::vector<PickleValue*> pop_to_mark() {
    TESSERA_CHECK(!marks_.empty(), UsageError, "opcode at byte ", at_ - 1, " finds no mark");
    std::vector<PickleValue*> items(stack_.begin() + static_cast<ptrdiff_t>(marks_.back()), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  PickleValue& top(Kind kind) {
    TESSERA_CHECK(!stack_.empty() && stack_.back()->kind == kind, UsageError, "opcode at byte ", at_ - 1, " needs ",
                  kind_name(kind), " on the stack");
    return *stack_.back();
  }
  void push(PickleValue* value) { stack_.push_back(value); }
  void push_number(Kind kind, int64_t number) {
    auto* value = make(kind);
    value->number = number;
    push(value);
  }
  void push_text(std::string_view text) {
    auto* value = make(Kind::Text);
    value->text = text;
    push(value);
  }
  void push_items(Kind kind, const std::vector<PickleValue*>& items) {
    auto* value = make(kind);
    value->items.assign(items.begin(), items.end());
    push(value);
  }
  void push_tuple(size_t count) {
    std::vector<PickleValue*> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    push_items(Kind::Tuple, items);
  }
  void push_global(std::string_view module, std::string_view name) {
    auto* value = make(Kind::Global);
    value->text = c10::str(module, " ", name);
    TESSERA_CHECK(is_allowed(value->text), UsageError, "it names ", module, ".", name,
                  ", which is not a class of a checkpoint; nothing of it was executed");
    push(value);
  }
  void push_long(std::string_view digits) {  // little-endian, two's complement
    TESSERA_CHECK(digits.size() <= 8, UsageError, "an int of ", digits.size(), " bytes is too large");
    int64_t value = !digits.empty() && (digits.back() & 0x80) ? -1 : 0;
    for (size_t i = digits.size(); i-- > 0;)
      value = static_cast<int64_t>(static_cast<uint64_t>(value) << 8 | static_cast<unsigned char>(digits[i]));
    push_number(Kind::Int, value);
  }
  void memoize(uint64_t key) {
    TESSERA_CHECK(!stack_.empty(), UsageError, "opcode at byte ", at_ - 1, " finds no value on the stack");
    memo_[key] = stack_.back();
  }
  void recall(uint64_t key) {
    const auto found = memo_.find(key);
    TESSERA_CHECK(found != memo_.end(), UsageError, "value ", key, " is used before it is stored");
    push(found->second);
  }
  void append(PickleValue& to, const std::vector<PickleValue*>& items) {
    TESSERA_CHECK(to.kind != Kind::Dict || items.size() % 2 == 0, UsageError, "a dict has a key without a value");
    to.items.insert(to.items.end(), items.begin(), items.end());
  }

  // Executes one opcode. Returns false at the end.
  bool step() {
    const char code = take(1)[0];
    switch (code) {
      case '\x80': {  // PROTO
        const int version = number<uint8_t>();
        TESSERA_CHECK(version >= 2 && version <= 5, UsageError, "pickle protocol ", version, "; 2 to 5 are read");
        return true;
      }
      case '\x95':
        take(8);
        return true;  // FRAME: only a hint for reading
      case '.':
        return false;
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case '0':
        pop();
        return true;
      case 'N':
        push(make(Kind::None));
        return true;
      case '\x88':
        push_number(Kind::Bool, 1);
        return true;
      case '\x89':
        push_number(Kind::Bool, 0);
        return true;
      case 'K':
        push_number(Kind::Int, number<uint8_t>());
        return true;
      case 'M':
        push_number(Kind::Int, number<uint16_t>());
        return true;
      case 'J':
        push_number(Kind::Int, number<int32_t>());
        return true;
      case '\x8a':
        push_long(take(number<uint8_t>()));
        return true;
      case 'G': {
        auto* value = make(Kind::Real);
        uint64_t bits = 0;
        for (const char byte : take(8)) bits = bits << 8 | static_cast<unsigned char>(byte);
        value->real = std::bit_cast<double>(bits);
        push(value);
        return true;
      }
      case 'X':
        push_text(take(number<uint32_t>()));
        return true;
      case '\x8c':
        push_text(take(number<uint8_t>()));
        return true;
      case '\x8d':
        push_text(take(number<uint64_t>()));
        return true;
      case ')':
        push(make(Kind::Tuple));
        return true;
      case ']':
        push(make(Kind::List));
        return true;
      case '}':
        push(make(Kind::Dict));
        return true;
      case '\x85':
        push_tuple(1);
        return true;
      case '\x86':
        push_tuple(2);
        return true;
      case '\x87':
        push_tuple(3);
        return true;
      case 't':
        push_items(Kind::Tuple, pop_to_mark());
        return true;
      case 'l':
        push_items(Kind::List, pop_to_mark());
        return true;
      case 'a': {
        auto* item = pop();
        append(top(Kind::List), {item});
        return true;
      }
      case 'e': {
        const auto items = pop_to_mark();
        append(top(Kind::List), items);
        return true;
      }
      case 's': {
        auto* value = pop();
        auto* key = pop();
        append(top(Kind::Dict), {key, value});
        return true;
      }
      case 'u': {
        const auto items = pop_to_mark();
        append(top(Kind::Dict), items);
        return true;
      }
      case 'q':
        memoize(number<uint8_t>());
        return true;
      case 'r':
        memoize(number<uint32_t>());
        return true;
      case '\x94':
        memoize(memo_.size());
        return true;
      case 'h':
        recall(number<uint8_t>());
        return true;
      case 'j':
        recall(number<uint32_t>());
        return true;
      case 'c': {
        const auto module = line();
        push_global(module, line());
        return true;
      }
      case '\x93': {  // STACK_GLOBAL
        const auto name = pop()->string(), module = pop()->string();
        push_global(module, name);
        return true;
      }
      case 'Q':
        push_items(Kind::PersistentId, {pop()});
        return true;
      case 'R': {
        auto* arguments = pop();
        auto* function = pop();
        TESSERA_CHECK(function->is(Kind::Global) && arguments->is(Kind::Tuple), UsageError,
                      "a call of something that is not a function");
        push_items(Kind::Call, {function, arguments});
        return true;
      }
      case '\x81': {  // NEWOBJ
        auto* arguments = pop();
        auto* type = pop();
        TESSERA_CHECK(type->is(Kind::Global) && arguments->is(Kind::Tuple) && arguments->items.empty(), UsageError,
                      "an object of something that is not a class, or with arguments");
        push_items(Kind::Object, {type});
        return true;
      }
      case 'b': {  // BUILD
        auto* state = pop();
        TESSERA_CHECK(!stack_.empty() && (stack_.back()->is(Kind::Object) || stack_.back()->is(Kind::Call)), UsageError,
                      "a state of something that is not an object");
        if (stack_.back()->is(Kind::Object)) stack_.back()->items = {stack_.back()->items.front(), state};
        return true;
      }
      default:
        TESSERA_FAIL(UsageError, "opcode ", static_cast<int>(static_cast<unsigned char>(code)), " at byte ", at_ - 1,
                     " does not occur in checkpoints");
    }
  }

  std::string_view bytes_;
  uint64_t at_ = 0;
  Pickle pickle_;
  std::vector<PickleValue*> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, PickleValue*> memo_;
};

Pickle Pickle::parse(std::string_view bytes, const std::string& what) {
  try {
    return PickleParser(bytes).run();
  } catch (const UsageError& error) {
    TESSERA_FAIL(UsageError, what, ": ", error.what_without_backtrace());
  }
}

PickleWriter::PickleWriter() { bytes_ = "\x80\x02"; }
PickleWriter& PickleWriter::op(char code) {
  bytes_ += code;
  return *this;
}
template <class T>
void PickleWriter::raw(T value) {
  bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
}
PickleWriter& PickleWriter::none() { return op('N'); }
PickleWriter& PickleWriter::boolean(bool value) { return op(value ? '\x88' : '\x89'); }
PickleWriter& PickleWriter::integer(int64_t value) {
  if (value >= 0 && value < 256) {
    op('K');
    raw(static_cast<uint8_t>(value));
  } else if (value == static_cast<int32_t>(value)) {
    op('J');
    raw(static_cast<int32_t>(value));
  } else {
    op('\x8a');
    raw(uint8_t{8});
    raw(value);
  }
  return *this;
}
PickleWriter& PickleWriter::real(double value) {
  op('G');
  const auto bits = std::bit_cast<uint64_t>(value);
  for (int shift = 56; shift >= 0; shift -= 8) bytes_ += static_cast<char>(bits >> shift);
  return *this;
}
PickleWriter& PickleWriter::text(std::string_view value) {
  op('X');
  raw(static_cast<uint32_t>(value.size()));
  bytes_ += value;
  return *this;
}
PickleWriter& PickleWriter::global(std::string_view module, std::string_view name) {
  op('c');
  bytes_ += module;
  bytes_ += '\n';
  bytes_ += name;
  bytes_ += '\n';
  return *this;
}
PickleWriter& PickleWriter::begin_tuple() { return op('('); }
PickleWriter& PickleWriter::end_tuple() { return op('t'); }
PickleWriter& PickleWriter::begin_list() { return op(']').op('('); }
PickleWriter& PickleWriter::end_list() { return op('e'); }
PickleWriter& PickleWriter::begin_dict() { return op('}').op('('); }
PickleWriter& PickleWriter::end_dict() { return op('u'); }
PickleWriter& PickleWriter::call() { return op('R'); }
PickleWriter& PickleWriter::new_object() { return op(')').op('\x81'); }
PickleWriter& PickleWriter::set_state() { return op('b'); }
PickleWriter& PickleWriter::persistent_id() { return op('Q'); }
std::string PickleWriter::finish() { return std::move(op('.').bytes_); }

}  // namespace tessera::dcp
