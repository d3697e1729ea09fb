#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

// A JSON value: what headers and manifests are written in. Own code, for the library proper needs LibTorch alone, and a
// header may come from anyone: strict (RFC 8259), no key twice, at most 16 values inside of each other.
// Whole numbers that fit are int64_t, all others double. Members of an object stay in order.
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

  // Throws UsageError that says what it is of, the byte and what was found there. So do the calls below, for a value
  // that is another kind, or has no such member.
  static Json parse(std::string_view text, const std::string& what);
  std::string dump() const;  // on one line. UsageError for numbers that JSON has not: nan, inf

  // Not of a value that is about to go: a loop over its members would outlive it.
  const Object& members() const&;
  const Array& items() const&;
  const std::string& text() const&;
  const Object& members() const&& = delete;
  const Array& items() const&& = delete;
  int64_t number() const;
  std::vector<int64_t> numbers() const;  // an array of them
  const Json& at(std::string_view key) const;
  const Json* find(std::string_view key) const;  // nullptr if there is none, or this is no object

  template <class T>
  const T* get_if() const {
    return std::get_if<T>(&value_);
  }

 private:
  std::variant<std::nullptr_t, bool, int64_t, double, std::string, Array, Object> value_ = nullptr;
  friend class JsonReader;
};

}  // namespace tessera
