#pragma once
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"

#include <memory>

namespace tessera::data_parallel::fsdp {

// Makes everything that is sharded in and below the root follow one schedule, and names the units by their place in it.
// Throws UsageError if a part of it has run by itself before, if a unit's parameter is also used outside of the unit,
// or if other ranks have other units. The first module of a tree to run is its root.
void make_tree(ShardedModule& root);

}  // namespace tessera::data_parallel::fsdp
