#pragma once
#include "tessera/redistribute/detail/plan.h"

namespace tessera::redistribute::detail {

// The cheapest path, by trying: Dijkstra's search over the placements every axis can have. Null where there is none.
std::unique_ptr<Plan> search(const Problem& problem);

}  // namespace tessera::redistribute::detail
