#pragma once
#include "tessera/base/detail/settings.h"

#include <unistd.h>

#include <cstdint>
#include <fstream>

// Tests that nothing grows. Their long form (make soak) sets TESSERA_SOAK; the short one is part of every test run.
namespace tessera::testing {

inline bool long_soak() { return setting("TESSERA_SOAK") == "1"; }

inline int64_t resident_bytes() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// What may come and go without being growth: the allocator's arenas, pages first touched.
inline constexpr int64_t kSoakSlack = int64_t{4} << 20;

}  // namespace tessera::testing
