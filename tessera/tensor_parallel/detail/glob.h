#pragma once
#include <string>
#include <string_view>
#include <vector>

// Patterns for module names in plans.
namespace tessera {

// Whether the entire name matches. Matching is case-sensitive.
//
//   *        any characters, or none
//   ?        one character
//   [abc]    one of these; [a-c] one in this range; [!abc] any other character
//   [*] []]  a special character itself; there is no other way to quote: a backslash is a backslash
//
// This is Python's fnmatchcase, which PyTorch's plans use. POSIX fnmatch(3) differs: it also has [^a] and [[:alpha:]],
// and its ranges depend on the locale.
bool glob_matches(std::string_view pattern, std::string_view name);

// The same for dotted names. Each segment of the pattern matches one segment of the name, so * does not match a dot. ""
// is the root module.
// Example:  path_matches("layers.*.wq", "layers.0.wq") holds; "layers.*" does not match "layers.0.wq".
bool path_matches(std::string_view pattern, std::string_view path);

// The paths that match, in their order.
std::vector<std::string> matching_paths(std::string_view pattern, const std::vector<std::string>& paths);

// Explains in an error message why a pattern matches no path: the first level that does not match, the children at that
// level, and similar names. `paths` are the names of named_modules().
// Example:  no child of 'layers.0.attn' matches 'wz'; it has wq, wk, wv, wo. Nearest names: layers.0.attn.wq
std::string why_unmatched(std::string_view pattern, const std::vector<std::string>& paths);

}  // namespace tessera
