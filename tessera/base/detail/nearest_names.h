#pragma once
#include <string>
#include <vector>

namespace tessera {

// The names most like a mistyped one, best first: by the fewest letters to insert, drop or change. None that differs in
// more than half of its letters.
// Example:  nearest_names("gpt2-124", {"gpt2-124m", "llama-8b"})  gives {"gpt2-124m"}
std::vector<std::string> nearest_names(const std::string& name, const std::vector<std::string>& known, size_t most = 3);

// "did you mean 'a' or 'b'?", or "" if nothing is near.
std::string did_you_mean(const std::string& name, const std::vector<std::string>& known);

}  // namespace tessera
