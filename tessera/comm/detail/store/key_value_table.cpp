#include "tessera/comm/detail/store/key_value_table.h"

#include "tessera/base/error.h"

#include <charconv>

namespace tessera::comm::store {
namespace {

Message done(std::vector<std::string> fields = {}, int64_t number = 0) {
  return make_message(ReplyCode::Done, std::move(fields), number);
}

// An empty value counts as 0, as in c10d::HashStore.
bool parse_counter(const std::string& text, int64_t& value) {
  value = 0;
  const char* const end = text.data() + text.size();
  return text.empty() || std::from_chars(text.data(), end, value) == std::from_chars_result{end, std::errc()};
}

}  // namespace

KeyValueTable::Result KeyValueTable::execute(const Message& request) {
  const auto& fields = request.fields;
  switch (static_cast<RequestCode>(request.code)) {
    case RequestCode::Set:
      return set(request);
    case RequestCode::CompareSet:
      return compare_set(request);
    case RequestCode::Get:
      return get(request);
    case RequestCode::Add:
      return add(request);
    case RequestCode::DeleteKey:
      return {.reply = done({}, static_cast<int64_t>(values_.erase(fields[0])))};
    case RequestCode::Check:
      return check(request);
    case RequestCode::Wait:
      return wait(request);
    case RequestCode::NumKeys:
      return {.reply = done({}, static_cast<int64_t>(values_.size()))};
    case RequestCode::Append:
      return append(request);
  }
  TESSERA_FAIL(InternalError, "request code ", static_cast<int>(request.code), " of the store is unknown");
}

KeyValueTable::Result KeyValueTable::set(const Message& request) {
  Result result{.reply = done()};
  for (size_t i = 0; i < request.fields.size(); i += 2) {
    values_[request.fields[i]] = request.fields[i + 1];
    result.written_keys.push_back(request.fields[i]);
  }
  return result;
}

// A key that does not exist equals an empty `expected`. The reply is the value after the operation, or `expected` if
// the key still does not exist.
KeyValueTable::Result KeyValueTable::compare_set(const Message& request) {
  const auto &key = request.fields[0], &expected = request.fields[1], &desired = request.fields[2];
  const auto found = values_.find(key);
  if (found != values_.end() && found->second != expected) return {.reply = done({found->second})};
  if (found == values_.end() && !expected.empty()) return {.reply = done({expected})};
  values_[key] = desired;
  return {.reply = done({desired}), .written_keys = {key}};
}

KeyValueTable::Result KeyValueTable::get(const Message& request) {
  if (const auto* key = find_missing(request.fields)) return {.missing_key = *key};
  Result result{.reply = done()};
  for (const auto& key : request.fields) result.reply->fields.push_back(values_.at(key));
  return result;
}

KeyValueTable::Result KeyValueTable::add(const Message& request) {
  const auto& key = request.fields[0];
  const auto found = values_.find(key);
  const std::string text = found == values_.end() ? "" : found->second;
  int64_t value = 0, sum = 0;
  if (!parse_counter(text, value))
    return {.reply = make_message(ReplyCode::Refused, {c10::str("the value of ", quote_key(key), " (", text.size(),
                                                                " bytes) is not a number; add() needs a key that only "
                                                                "add() has written")})};
  if (__builtin_add_overflow(value, request.number, &sum))
    return {.reply =
                make_message(ReplyCode::Refused, {c10::str("the value of ", quote_key(key), " is ", value, ", and ",
                                                           request.number, " more does not fit into 64 bits")})};
  values_[key] = std::to_string(sum);
  return {.reply = done({}, sum), .written_keys = {key}};
}

KeyValueTable::Result KeyValueTable::append(const Message& request) {
  values_[request.fields[0]] += request.fields[1];
  return {.reply = done(), .written_keys = {request.fields[0]}};
}

KeyValueTable::Result KeyValueTable::check(const Message& request) const {
  return {.reply = done({}, find_missing(request.fields) == nullptr)};
}

KeyValueTable::Result KeyValueTable::wait(const Message& request) const {
  if (const auto* key = find_missing(request.fields)) return {.missing_key = *key};
  return {.reply = done()};
}

const std::string* KeyValueTable::find_missing(const std::vector<std::string>& keys) const {
  for (const auto& key : keys)
    if (!values_.contains(key)) return &key;
  return nullptr;
}

std::string quote_key(std::string_view key) {
  constexpr size_t kShown = 80;
  std::string text = "'";
  for (const char c : key.substr(0, kShown)) text += c >= ' ' && c < '\x7f' ? c : '?';
  return text + (key.size() > kShown ? c10::str("...' (", key.size(), " bytes)") : "'");
}

}  // namespace tessera::comm::store
