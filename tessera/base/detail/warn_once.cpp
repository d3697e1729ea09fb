#include "tessera/base/detail/warn_once.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <set>

namespace tessera {

void warn_once(std::string_view key, const std::string& message) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> said;
  {
    std::lock_guard lock(mutex);
    if (said.find(key) != said.end()) return;
    said.emplace(key);
  }
  TORCH_WARN(message);
}

}  // namespace tessera
