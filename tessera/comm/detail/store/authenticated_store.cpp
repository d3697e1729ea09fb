#include "tessera/comm/detail/store/authenticated_store.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/store/key_value_table.h"

namespace tessera::comm::store {
namespace {

// The server ends a wait in time. The client gives it this long for the reply, then takes it as stopped.
constexpr std::chrono::milliseconds kReplyDelay(2000);

std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// "get of key 'x'", "wait of 3 keys, the first is 'a'"
std::string describe_request(const char* operation, const Message& request) {
  const auto code = static_cast<RequestCode>(request.code);
  const size_t per_key = code == RequestCode::Set || code == RequestCode::Append ? 2 : 1;
  const size_t keys = code == RequestCode::CompareSet ? 1 : request.fields.size() / per_key;
  if (keys == 0) return operation;
  const std::string first = quote_key(request.fields[0]);
  return keys == 1 ? c10::str(operation, " of key ", first)
                   : c10::str(operation, " of ", keys, " keys, the first is ", first);
}

}  // namespace

AuthenticatedStore::AuthenticatedStore(AuthenticatedStoreOptions options)
    : Store(options.timeout), options_(std::move(options)), secret_(options_.secret) {
  idle_connections_.push_back(ClientConnection::open(options_.server, secret_, deadline_after(timeout_)));
}

c10::intrusive_ptr<c10d::Store> AuthenticatedStore::clone() {
  auto copy = c10::make_intrusive<AuthenticatedStore>(options_);
  copy->setTimeout(timeout_);
  return copy;
}

void AuthenticatedStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  call("set", make_message(RequestCode::Set, {key, text_of(value)}));
}

std::vector<uint8_t> AuthenticatedStore::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                                    const std::vector<uint8_t>& desired) {
  const auto request = make_message(RequestCode::CompareSet, {key, text_of(expected), text_of(desired)});
  return bytes_of(call("compareSet", request).fields.at(0));
}

std::vector<uint8_t> AuthenticatedStore::get(const std::string& key) {
  const auto reply = call_with_timeout("get", make_message(RequestCode::Get, {key}), timeout_);
  return bytes_of(reply.fields.at(0));
}

int64_t AuthenticatedStore::add(const std::string& key, int64_t value) {
  return call("add", make_message(RequestCode::Add, {key}, value)).number;
}

bool AuthenticatedStore::deleteKey(const std::string& key) {
  return call("deleteKey", make_message(RequestCode::DeleteKey, {key})).number == 1;
}

bool AuthenticatedStore::check(const std::vector<std::string>& keys) {
  return call("check", make_message(RequestCode::Check, keys)).number == 1;
}

int64_t AuthenticatedStore::getNumKeys() { return call("getNumKeys", make_message(RequestCode::NumKeys)).number; }

void AuthenticatedStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void AuthenticatedStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  call_with_timeout("wait", make_message(RequestCode::Wait, keys), timeout);
}

void AuthenticatedStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  call("append", make_message(RequestCode::Append, {key, text_of(value)}));
}

std::vector<std::vector<uint8_t>> AuthenticatedStore::multiGet(const std::vector<std::string>& keys) {
  const auto reply = call_with_timeout("multiGet", make_message(RequestCode::Get, keys), timeout_);
  std::vector<std::vector<uint8_t>> values;
  for (const auto& field : reply.fields) values.push_back(bytes_of(field));
  return values;
}

void AuthenticatedStore::multiSet(const std::vector<std::string>& keys,
                                  const std::vector<std::vector<uint8_t>>& values) {
  TESSERA_CHECK(keys.size() == values.size(), UsageError, "multiSet: ", keys.size(), " keys and ", values.size(),
                " values; pass one value per key");
  auto request = make_message(RequestCode::Set);
  for (size_t i = 0; i < keys.size(); i++) {
    request.fields.push_back(keys[i]);
    request.fields.push_back(text_of(values[i]));
  }
  call("multiSet", request);
}

Message AuthenticatedStore::call_with_timeout(const char* operation, Message request,
                                              std::chrono::milliseconds timeout) {
  request.number = timeout.count();
  return call(operation, request);
}

Message AuthenticatedStore::call(const char* operation, const Message& request) {
  const auto code = static_cast<RequestCode>(request.code);
  const bool waits = code == RequestCode::Get || code == RequestCode::Wait;
  const std::chrono::milliseconds timeout = waits ? std::chrono::milliseconds(request.number) : timeout_;
  const std::string purpose = describe_request(operation, request);
  TESSERA_CHECK(body_bytes(request) <= kMaxBodyBytes, UsageError, "store, ", purpose, ": the request has ",
                body_bytes(request), " bytes; at most ", kMaxBodyBytes, " are allowed. Split it over several keys");

  Deadline deadline = deadline_after(timeout);
  if (deadline != kNoDeadline) deadline = std::max(deadline, Clock::now()) + kReplyDelay;
  auto connection = take_connection(deadline, purpose);
  const Message reply = connection->call(request, deadline, purpose);
  {
    const std::lock_guard lock(mutex_);
    idle_connections_.push_back(std::move(connection));
  }
  TESSERA_CHECK(reply.code != static_cast<uint8_t>(ReplyCode::TimedOut), CommError, "store, ", purpose, ": waited ",
                static_cast<double>(timeout.count()) / 1000.0, " s for key ", quote_key(reply.fields.at(0)),
                ", which no rank has set in the store at ", to_text(options_.server),
                "; the rank that sets it is late or has stopped");
  TESSERA_CHECK(reply.code == static_cast<uint8_t>(ReplyCode::Done), UsageError, "store, ", purpose, ": ",
                reply.fields.at(0));
  return reply;
}

std::unique_ptr<ClientConnection> AuthenticatedStore::take_connection(Deadline deadline, const std::string& purpose) {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_connections_.empty()) {
      auto connection = std::move(idle_connections_.back());
      idle_connections_.pop_back();
      return connection;
    }
  }
  return ClientConnection::open(options_.server, secret_, deadline, purpose);
}

}  // namespace tessera::comm::store
