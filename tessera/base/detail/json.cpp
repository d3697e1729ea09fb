#include "tessera/base/detail/json.h"

#include "tessera/base/error.h"

#include <charconv>
#include <cmath>
#include <unordered_set>

namespace tessera {

class JsonReader {
 public:
  JsonReader(std::string_view text, const std::string& what) : text_(text), what_(what) {}

  Json document() {
    Json value = any(0);
    skip_spaces();
    if (at_ != text_.size()) fail("an end");
    return value;
  }

 private:
  static constexpr int kDeepest = 16;

  [[noreturn]] void fail(const std::string& wanted) const {
    std::string found = "its end";
    if (at_ < text_.size()) {
      const auto c = static_cast<unsigned char>(text_[at_]);
      found = c >= ' ' && c < 127 ? c10::str("'", text_[at_], "'") : c10::str("byte ", static_cast<int>(c));
    }
    TESSERA_FAIL(UsageError, what_, " is not valid JSON: ", wanted, " was expected at byte ", at_, ", and ", found,
                 " is there");
  }

  void skip_spaces() {
    while (at_ < text_.size() && std::string_view(" \t\n\r").find(text_[at_]) != std::string_view::npos) at_++;
  }
  bool take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    at_++;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(c10::str("'", c, "'"));
  }
  bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json any(int depth) {
    TESSERA_CHECK(depth <= kDeepest, UsageError, what_, " is not valid JSON for this reader: at byte ", at_,
                  " it is nested more than ", kDeepest, " levels deep");
    skip_spaces();
    Json value;
    if (at_ >= text_.size()) fail("a value");
    if (text_[at_] == '{')
      value.value_ = object(depth);
    else if (text_[at_] == '[')
      value.value_ = array(depth);
    else if (text_[at_] == '"')
      value.value_ = string();
    else if (take_word("true"))
      value.value_ = true;
    else if (take_word("false"))
      value.value_ = false;
    else if (!take_word("null"))
      value = number();
    return value;
  }

  Json::Object object(int depth) {
    Json::Object members;
    std::unordered_set<std::string> keys;
    expect('{');
    skip_spaces();
    if (take('}')) return members;
    do {
      skip_spaces();
      const auto start = at_;
      auto key = string();
      TESSERA_CHECK(keys.insert(key).second, UsageError, what_, " has '", key, "' twice, the second time at byte ",
                    start);
      skip_spaces();
      expect(':');
      members.emplace_back(std::move(key), any(depth + 1));
      skip_spaces();
    } while (take(','));
    expect('}');
    return members;
  }

  Json::Array array(int depth) {
    Json::Array items;
    expect('[');
    skip_spaces();
    if (take(']')) return items;
    do {
      items.push_back(any(depth + 1));
      skip_spaces();
    } while (take(','));
    expect(']');
    return items;
  }

  Json number() {
    const auto start = at_;
    const auto digits = [&] {
      const auto first = at_;
      while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') at_++;
      if (at_ == first) fail("a value");
      return at_ - first;
    };
    take('-');
    const bool zero_first = at_ < text_.size() && text_[at_] == '0';
    if (digits() > 1 && zero_first) fail("a number without zeros in front");
    bool is_integer = true;
    if (take('.')) digits(), is_integer = false;
    if (take('e') || take('E')) {
      if (!take('+')) take('-');
      digits(), is_integer = false;
    }
    const char *first = text_.data() + start, *last = text_.data() + at_;
    int64_t integer = 0;
    if (is_integer && std::from_chars(first, last, integer).ec == std::errc()) return integer;
    double real = 0;
    if (std::from_chars(first, last, real).ec != std::errc()) fail("a number in range");
    return real;
  }

  std::string string() {
    std::string out;
    expect('"');
    while (!take('"')) {
      if (at_ >= text_.size() || static_cast<unsigned char>(text_[at_]) < ' ') fail("a character of a string");
      if (take('\\'))
        append_escape(out);
      else
        out += text_[at_++];
    }
    return out;
  }

  void append_escape(std::string& out) {
    static constexpr std::string_view kShort = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
    if (take('u')) return append_utf8(code_point(), out);
    const auto which = at_ < text_.size() ? kShort.find(text_[at_]) : std::string_view::npos;
    if (which == std::string_view::npos) fail("an escape");
    out += kMeant[which];
    at_++;
  }

  uint32_t four_hex() {
    uint32_t code = 0;
    const char* first = text_.data() + at_;
    if (text_.size() - at_ < 4 || std::from_chars(first, first + 4, code, 16).ptr != first + 4) fail("four hex digits");
    at_ += 4;
    return code;
  }

  uint32_t code_point() {  // a character beyond 16 bits is a surrogate pair
    const uint32_t first = four_hex();
    if (first < 0xd800 || first >= 0xe000) return first;
    if (first >= 0xdc00 || !take_word("\\u")) fail("a pair of surrogates");
    const uint32_t second = four_hex();
    if (second < 0xdc00 || second >= 0xe000) fail("a pair of surrogates");
    return 0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00);
  }

  static void append_utf8(uint32_t code, std::string& out) {
    const auto tail = [&](int shift) { out += static_cast<char>(0x80 | (code >> shift & 0x3f)); };
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else if (code < 0x800) {
      out += static_cast<char>(0xc0 | code >> 6), tail(0);
    } else if (code < 0x10000) {
      out += static_cast<char>(0xe0 | code >> 12), tail(6), tail(0);
    } else {
      out += static_cast<char>(0xf0 | code >> 18), tail(12), tail(6), tail(0);
    }
  }

  std::string_view text_;
  const std::string& what_;
  size_t at_ = 0;
};

Json Json::parse(std::string_view text, const std::string& what) { return JsonReader(text, what).document(); }

namespace {

void append_text(std::string_view text, std::string& out) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= ' ') {
      out += c;
      continue;
    }
    constexpr char kHex[] = "0123456789abcdef";
    out += c10::str("\\u00", kHex[c >> 4], kHex[c & 15]);
  }
  out += '"';
}

void append(const Json& json, std::string& out) {
  if (const auto* object = json.get_if<Json::Object>()) {
    out += '{';
    for (const auto& [key, value] : *object) {
      if (out.back() != '{') out += ',';
      append_text(key, out);
      out += ':';
      append(value, out);
    }
    out += '}';
  } else if (const auto* array = json.get_if<Json::Array>()) {
    out += '[';
    for (const auto& item : *array) {
      if (out.back() != '[') out += ',';
      append(item, out);
    }
    out += ']';
  } else if (const auto* text = json.get_if<std::string>()) {
    append_text(*text, out);
  } else if (const auto* integer = json.get_if<int64_t>()) {
    out += std::to_string(*integer);
  } else if (const auto* real = json.get_if<double>()) {
    TESSERA_CHECK(std::isfinite(*real), UsageError, "JSON cannot represent the number ", *real,
                  "; store it as a string");
    char digits[32];  // the fewest digits that parse to the same number
    std::string shortest(digits, std::to_chars(digits, digits + sizeof digits, *real).ptr);
    if (shortest.find_first_of(".e") == std::string::npos) shortest += ".0";  // so that it parses as a double
    out += shortest;
  } else if (const auto* truth = json.get_if<bool>()) {
    out += *truth ? "true" : "false";
  } else {
    out += "null";
  }
}

template <class T>
const T& as(const Json& json, const char* what) {
  const auto* value = json.get_if<T>();
  if (value) return *value;
  auto text = json.dump();
  if (text.size() > 60) text = text.substr(0, 60) + "...";
  TESSERA_FAIL(UsageError, what, " was expected, and ", text, " is there");
}

}  // namespace

std::string Json::dump() const {
  std::string out;
  append(*this, out);
  return out;
}

const Json::Object& Json::members() const& { return as<Object>(*this, "an object"); }
const Json::Array& Json::items() const& { return as<Array>(*this, "an array"); }
const std::string& Json::text() const& { return as<std::string>(*this, "a text"); }
int64_t Json::number() const { return as<int64_t>(*this, "an integer"); }

std::vector<int64_t> Json::numbers() const {
  std::vector<int64_t> all;
  for (const auto& item : items()) all.push_back(item.number());
  return all;
}

const Json* Json::find(std::string_view key) const {
  if (const auto* object = get_if<Object>())
    for (const auto& [name, value] : *object)
      if (name == key) return &value;
  return nullptr;
}

const Json& Json::at(std::string_view key) const {
  members();
  const Json* value = find(key);
  TESSERA_CHECK(value, UsageError, "there is no '", key, "'");
  return *value;
}

}  // namespace tessera
