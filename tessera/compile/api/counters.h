#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace tessera {

// Counters by group and name, as torch._dynamo.utils.counters. Compiler passes add to them under PyTorch's names.
//
//   counters()["inductor"]["ddp_buckets"]     how many buckets fuse_ddp_* made
using Counters = std::map<std::string, std::map<std::string, int64_t>>;

// The counters of this thread. reset_compile_caches() (compile_backward.h) clears them.
Counters& counters();

}  // namespace tessera
