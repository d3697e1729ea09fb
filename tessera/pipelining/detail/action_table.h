#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/pipelining/detail/action.h"

// What each rank of a pipeline does, in order. An empty entry is a time step in which the rank waits.
namespace tessera::pipelining {

using RankActions = std::vector<std::optional<Action>>;
using ActionTable = std::vector<RankActions>;  // one row per rank

// One line per rank, actions separated by commas, nothing between two commas for a wait. PyTorch reads and writes the
// same form.
std::string to_csv(const ActionTable& table);
// The inverse. Throws UsageError with the line and the column of what is not an action.
ActionTable parse_csv(std::string_view text);

}  // namespace tessera::pipelining
