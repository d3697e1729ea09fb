#pragma once
#include <string>
#include <vector>

namespace tessera {

// The known names most similar to a mistyped one, best first, by edit distance. Names that differ in more than half of
// their letters are not listed.
// Example:  nearest_names("gpt2-124", {"gpt2-124m", "llama-8b"})  gives {"gpt2-124m"}
std::vector<std::string> nearest_names(const std::string& name, const std::vector<std::string>& known, size_t most = 3);

// "did you mean 'a' or 'b'?", or "" if no name is similar.
std::string did_you_mean(const std::string& name, const std::vector<std::string>& known);

}  // namespace tessera
