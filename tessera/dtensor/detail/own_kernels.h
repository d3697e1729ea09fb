#pragma once
#include <string>
#include <unordered_set>

namespace tessera::detail {

// Ops on DTensors with a kernel of their own instead of a sharding rule: random ops, and ops that return a host value.
const std::unordered_set<std::string>& ops_with_own_kernel();  // "aten::equal"

}  // namespace tessera::detail
