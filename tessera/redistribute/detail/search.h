#pragma once
#include "tessera/redistribute/detail/plan.h"

namespace tessera::redistribute::detail {

// The cheapest plan, found by Dijkstra's algorithm over the placements that each axis can have. Null if no plan exists.
std::unique_ptr<Plan> search(const Problem& problem);

}  // namespace tessera::redistribute::detail
