#pragma once
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"

namespace tessera::data_parallel::fsdp {

// Creates one schedule for all sharded modules at and below `root` and names their parameter groups by module path.
// Runs in the first forward: the first module of a tree that runs is its root.
// Throws UsageError if an inner module ran by itself before, if a parameter is also used outside its group, or if ranks
// have different groups.
void set_up_module_tree(ShardedModule& root);

}  // namespace tessera::data_parallel::fsdp
