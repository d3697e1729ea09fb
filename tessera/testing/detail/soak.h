#pragma once
#include "tessera/base/detail/settings.h"

#include <unistd.h>

#include <cstdint>
#include <fstream>

// For tests that memory does not grow. `make soak` sets TESSERA_SOAK for the long form; every test run has the short
// form.
namespace tessera::testing {

inline bool long_soak() { return setting("TESSERA_SOAK") == "1"; }

inline int64_t resident_bytes() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Tolerance for changes that are not growth: allocator arenas, pages that are touched for the first time.
inline constexpr int64_t kSoakSlack = int64_t{4} << 20;

}  // namespace tessera::testing
