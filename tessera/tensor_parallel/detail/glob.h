#pragma once
#include <string>
#include <string_view>
#include <vector>

// Patterns for module names, as plans use them.
namespace tessera {

// Does the whole name match? Letters count as they are written.
//
//   *        any run of characters, also none
//   ?        one character
//   [abc]    one of these; [a-c] one between; [!abc] one that is none of these
//   [*] []]  a special character itself; there is no other way to quote: a backslash is a backslash
//
// This is Python's fnmatchcase, for which PyTorch's plans are written. POSIX fnmatch(3) is another language: it also
// knows
// [^a] and [[:alpha:]], and its ranges go by the locale.
bool glob_matches(std::string_view pattern, std::string_view name);

// The same for dotted paths, piece by piece: each piece of the pattern stands for one level of modules, so * never
// reaches over a dot. "" is the module itself.
// Example:  path_matches("layers.*.wq", "layers.0.wq") holds; "layers.*" does not match "layers.0.wq".
bool path_matches(std::string_view pattern, std::string_view path);

// Those of the paths that match, in their order.
std::vector<std::string> matching_paths(std::string_view pattern, const std::vector<std::string>& paths);

// Why a pattern matches none of the paths, for an error message: where it loses its way, what is there instead, and
// which names are like it. `paths` has every module, its parents included, as named_modules() lists them.
// Example:  no child of 'layers.0.attn' matches 'wz'; it has wq, wk, wv, wo. Nearest names: layers.0.attn.wq
std::string why_unmatched(std::string_view pattern, const std::vector<std::string>& paths);

}  // namespace tessera
