#include "tessera/base/detail/warn_once.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <set>

namespace tessera {

void warn_once(std::string_view key, const std::string& message) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> warned;
  {
    std::lock_guard lock(mutex);
    if (warned.find(key) != warned.end()) return;
    warned.emplace(key);
  }
  TORCH_WARN(message);
}

}  // namespace tessera
