#pragma once
#include <cstdint>
#include <map>
#include <string>

namespace tessera {

// What passes have counted, by PyTorch's names: counters()["inductor"]["ddp_buckets"]. Of this thread.
using Counters = std::map<std::string, std::map<std::string, int64_t>>;
Counters& counters();

}  // namespace tessera
