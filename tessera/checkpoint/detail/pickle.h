#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

// Python's pickle format, as far as PyTorch's checkpoints need it. Reading executes nothing: a pickle is data here.
// Only names of an allow-list may occur, so that a file that is not a checkpoint is refused with the name that it has.
namespace tessera::dcp {

// One value. Pickles share values, so a value may be in several places; a Pickle owns them all.
struct PickleValue {
  enum class Kind : uint8_t { None, Bool, Int, Real, Text, Tuple, List, Dict, Global, Call, Object, PersistentId };
  Kind kind = Kind::None;
  int64_t number = 0;  // Bool, Int
  double real = 0;
  std::string text;  // Text; Global: "module name"
  // Tuple, List: the items. Dict: key, value, key, value, ... Call: function, arguments (a Tuple). Object: class, then
  // its state, if it has one. PersistentId: the id.
  std::vector<const PickleValue*> items = {};

  // The accessors throw UsageError if the value is of another kind or has no such item.
  int64_t integer() const;
  const std::string& string() const;
  const PickleValue& item(size_t i) const;
  const PickleValue* find(std::string_view key) const;        // in a Dict, by a Text; null if it is not there
  const PickleValue& attribute(std::string_view name) const;  // of an Object whose state is a Dict
  bool is(Kind wanted) const { return kind == wanted; }
  bool is_global(std::string_view name) const { return kind == Kind::Global && text == name; }
  bool is_call(std::string_view function) const { return kind == Kind::Call && items.front()->is_global(function); }
  bool is_object(std::string_view class_name) const {
    return kind == Kind::Object && items.front()->is_global(class_name);
  }
};

// A parsed pickle.
class Pickle {
 public:
  // Protocols 2 to 5. Throws UsageError, which starts with `what`, for bytes that are not a pickle of this kind and for
  // a name that is not in the allow-list of pickle.cpp.
  static Pickle parse(std::string_view bytes, const std::string& what);
  const PickleValue& root() const { return *root_; }

 private:
  friend class PickleParser;
  std::vector<std::unique_ptr<PickleValue>> values_;
  const PickleValue* root_ = nullptr;
};

// Writes protocol 2, without shared values.
// Example:  PickleWriter p;  p.begin_dict();  p.text("a");  p.integer(1);  p.end_dict();  auto bytes = p.finish();
class PickleWriter {
 public:
  PickleWriter();
  PickleWriter& none();
  PickleWriter& boolean(bool value);
  PickleWriter& integer(int64_t value);
  PickleWriter& real(double value);
  PickleWriter& text(std::string_view value);
  PickleWriter& global(std::string_view module, std::string_view name);
  PickleWriter& begin_tuple();  // also the arguments of a call
  PickleWriter& end_tuple();
  PickleWriter& begin_list();
  PickleWriter& end_list();
  PickleWriter& begin_dict();
  PickleWriter& end_dict();
  PickleWriter& call();           // function and tuple on the stack: their result
  PickleWriter& new_object();     // class on the stack: an object of it
  PickleWriter& set_state();      // object and state on the stack: the object with this state
  PickleWriter& persistent_id();  // tuple on the stack
  std::string finish();

 private:
  PickleWriter& op(char code);
  template <class T>
  void raw(T value);
  std::string bytes_;
};

}  // namespace tessera::dcp
