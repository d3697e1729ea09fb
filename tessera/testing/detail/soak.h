#pragma once
#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"

#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <sstream>

// For tests that memory does not grow and for generators of programs. `make soak` sets TESSERA_SOAK for the long form;
// every test run has the short form.
namespace tessera::testing {

inline bool long_soak() { return setting("TESSERA_SOAK") == "1"; }

// Seeds of a generator of programs: `count` from `first` on; `long_count` in the long form, of which TESSERA_SOAK_PART
// ("3/16") selects a part.
struct SeedRange {
  uint32_t first, end;
};

inline SeedRange soak_seeds(uint32_t first, uint32_t count, uint32_t long_count) {
  if (!long_soak()) return {first, first + count};
  const auto text = setting("TESSERA_SOAK_PART");
  uint64_t part = 0, parts = 0;
  char slash = 0;
  TESSERA_CHECK(std::istringstream(text) >> part >> slash >> parts && slash == '/' && 1 <= part && part <= parts,
                UsageError, "TESSERA_SOAK_PART is '", text, "'; write K/N with 1 <= K <= N, for example 3/16");
  const auto seed = [&](uint64_t k) { return static_cast<uint32_t>(first + long_count * k / parts); };
  return {seed(part - 1), seed(part)};
}

inline int64_t resident_bytes() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Tolerance for changes that are not growth: allocator arenas, pages that are touched for the first time.
inline constexpr int64_t kSoakSlack = int64_t{4} << 20;

}  // namespace tessera::testing
