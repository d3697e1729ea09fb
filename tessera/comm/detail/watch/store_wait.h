#pragma once
#include <chrono>
#include <functional>
#include <string>

namespace c10d {
class Store;
}

namespace tessera::comm::watch {

// Waits until `key` is set and returns its value. Throws CommError after `timeout`.
// `lost` returns which member of the group is lost and why, or "". It is called a few times per second, and a lost
// member ends the wait with a CommError. `lost` may be null.
std::string wait_for_key(c10d::Store& store, const std::string& key, std::chrono::milliseconds timeout,
                         const std::function<std::string()>& lost);

}  // namespace tessera::comm::watch
