#pragma once
// Training runs on many meshes: what a list of them has, and how it is run.
#include "tessera/testing/detail/soak.h"
#include "tests/train/tiny_run.h"

#include <string>
#include <utility>
#include <vector>

namespace tessera::train {

using ConfigChanges = std::vector<std::pair<const char*, const char*>>;  // option and value

struct MeshCase {
  std::string mesh;
  ConfigChanges options = {};
  bool only_soak = true;  // false: every test run has it
};
inline constexpr bool kInEveryRun = false;

// Calls check(config of the case, its name) for each case of this form of the test: in the long form all, or those of
// TESSERA_SOAK_PART.
template <class Check>
void for_each_case(const TrainConfig& config, const std::vector<MeshCase>& cases, Check check) {
  const auto size = static_cast<uint32_t>(cases.size());
  const auto part = tessera::testing::soak_seeds(0, size, size);
  for (auto i = part.first; i < part.end; i++) {
    const auto& each = cases[i];
    if (each.only_soak && !tessera::testing::long_soak()) continue;
    auto changed = config;
    changed.parallel.mesh = each.mesh;
    std::string name = each.mesh;
    for (const auto& [key, value] : each.options) {
      set_option(changed, key, value);
      name += c10::str(" ", key, "=", value);
    }
    check(changed, name);
  }
}

}  // namespace tessera::train
