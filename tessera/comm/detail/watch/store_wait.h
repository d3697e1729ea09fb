#pragma once
#include <chrono>
#include <functional>
#include <string>

namespace c10d {
class Store;
}

namespace tessera::comm::watch {

// The value of `key`, once somebody has set it. Throws CommError after `timeout`, or as soon as `lost` says that the
// one who should have set it, or any other member, is gone; it is asked a few times a second. No `lost`: nobody tells.
std::string wait_for_key(c10d::Store& store, const std::string& key, std::chrono::milliseconds timeout,
                         const std::function<std::string()>& lost);

}  // namespace tessera::comm::watch
