#include "tessera/rules/detail/hidden_writes.h"

#include <algorithm>

namespace tessera::rules {
namespace {

// Running statistics, all of them: running_mean, running_var.
const std::vector<HiddenWrites>& table() {
  static const auto* entries = new std::vector<HiddenWrites>{
      {"aten::native_batch_norm", {3, 4}, 5},    {"aten::cudnn_batch_norm", {3, 4}, 5},
      {"aten::miopen_batch_norm", {3, 4}, 5},    {"aten::batch_norm_update_stats", {1, 2}},
      {"aten::batch_norm_gather_stats", {3, 4}}, {"aten::batch_norm_gather_stats_with_counts", {3, 4}},
  };
  return *entries;
}

}  // namespace

const HiddenWrites* hidden_writes(std::string_view op) {
  const auto found = std::find_if(table().begin(), table().end(), [&](const auto& entry) { return entry.op == op; });
  return found == table().end() ? nullptr : &*found;
}

}  // namespace tessera::rules
