#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// The names most like the one that was asked for and not found, best first, for error messages: by the number of
// letters to insert, drop, replace or swap with a neighbour; equals in the order given. At most `count`. Names that
// would have to be mostly rewritten are left out, so the answer may be empty.
//
// Example:  nearest("layer.0.wq", {"layers.0.wq", "layers.0.wk", "norm"})  ->  {"layers.0.wq", "layers.0.wk"}
std::vector<std::string> nearest(std::string_view wanted, const std::vector<std::string>& names, size_t count = 3);

// "did you mean 'a' or 'b'?", or "" if nothing is near.
std::string did_you_mean(std::string_view wanted, const std::vector<std::string>& names);

}  // namespace tessera
