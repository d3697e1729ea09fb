#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

// A JSON value, its parser and its writer. It is our own code because the library depends only on LibTorch. The parser
// is strict (RFC 8259), because files come from untrusted sources: keys are unique, nesting is at most 16 levels deep.
// Integers that fit are int64_t, all other numbers double. An object keeps the order of its members.
//
// Example:  const auto json = Json::parse(text, "the header of x.safetensors");
//           for (const auto& [name, entry] : json.members()) entry.at("shape").numbers();
class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;

  Json() = default;  // null
  Json(int64_t number) : value_(number) {}
  Json(double number) : value_(number) {}
  Json(std::string text) : value_(std::move(text)) {}
  Json(const char* text) : value_(std::string(text)) {}
  Json(Array items) : value_(std::move(items)) {}
  Json(Object members) : value_(std::move(members)) {}

  // Throws UsageError with `what`, the byte and the text found there. The accessors below throw UsageError for a value
  // of another type, or a missing member.
  static Json parse(std::string_view text, const std::string& what);
  std::string dump() const;  // on one line. Throws UsageError for nan and inf

  // Deleted for temporaries: a loop over the members would outlive the value.
  const Object& members() const&;
  const Array& items() const&;
  const std::string& text() const&;
  const Object& members() const&& = delete;
  const Array& items() const&& = delete;
  int64_t number() const;
  std::vector<int64_t> numbers() const;  // of an array of integers
  const Json& at(std::string_view key) const;
  const Json* find(std::string_view key) const;  // nullptr if it is missing, or this is not an object

  template <class T>
  const T* get_if() const {
    return std::get_if<T>(&value_);
  }

 private:
  std::variant<std::nullptr_t, bool, int64_t, double, std::string, Array, Object> value_ = nullptr;
  friend class JsonReader;
};

}  // namespace tessera
