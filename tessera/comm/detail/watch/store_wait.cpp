#include "tessera/comm/detail/watch/store_wait.h"

#include "tessera/base/error.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <thread>

namespace tessera::comm::watch {

std::string wait_for_key(c10d::Store& store, const std::string& key, std::chrono::milliseconds timeout,
                         const std::function<std::string()>& lost) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kSlice(250);
  auto deadline = Clock::now() + timeout;
  for (;;) {
    // At least 1 ms, because a store takes 0 as "no timeout".
    const auto left = std::max(std::chrono::milliseconds(1),
                               std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()));
    const auto slice = lost ? std::min(left, kSlice) : left;
    const auto began = Clock::now();
    try {
      store.wait({key}, slice);
      const auto value = store.get(key);
      return {value.begin(), value.end()};
    } catch (const std::exception& error) {
      // An error before the timeout means that the store is gone. Then `lost` soon names the rank that hosted it.
      // A timeout is a DistStoreError in some stores, another exception in others.
      if (!dynamic_cast<const c10::DistStoreError*>(&error) && Clock::now() - began < slice) {
        deadline = std::min(deadline, Clock::now() + std::chrono::seconds(1));
        std::this_thread::sleep_for(kSlice / 5);
      }
      if (const std::string why = lost ? lost() : ""; !why.empty()) TESSERA_FAIL(CommError, why);
      const auto* known = dynamic_cast<const c10::Error*>(&error);
      TESSERA_CHECK(Clock::now() < deadline, CommError, "waited ", static_cast<double>(timeout.count()) / 1000.0,
                    " s for '", key, "' in the store: ", known ? known->what_without_backtrace() : error.what());
    }
  }
}

}  // namespace tessera::comm::watch
