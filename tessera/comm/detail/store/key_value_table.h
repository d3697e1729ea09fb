#pragma once
#include "tessera/comm/detail/store/wire.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::comm::store {

// The keys and values of a store, as c10d::HashStore has them. One thread uses it.
class KeyValueTable {
 public:
  struct Result {
    std::optional<Message> reply = {};           // nullopt: a Get or Wait needs a key that does not exist yet
    std::string missing_key = {};                // that key
    std::vector<std::string> written_keys = {};  // requests that wait for these can be executed again
  };
  // Requires: is_request(request).
  Result execute(const Message& request);

 private:
  Result set(const Message& request);
  Result compare_set(const Message& request);
  Result get(const Message& request);
  Result add(const Message& request);
  Result append(const Message& request);
  Result check(const Message& request) const;
  Result wait(const Message& request) const;
  const std::string* find_missing(const std::vector<std::string>& keys) const;

  std::unordered_map<std::string, std::string> values_;
};

// For messages: "'rank_0/address'". A key that is long or binary is shortened and escaped.
std::string quote_key(std::string_view key);

}  // namespace tessera::comm::store
