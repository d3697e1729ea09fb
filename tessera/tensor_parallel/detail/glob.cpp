#include "tessera/tensor_parallel/detail/glob.h"

#include "tessera/base/detail/nearest_names.h"

#include <c10/util/StringUtil.h>

namespace tessera {
namespace {

// One item of a pattern that matches one character: a letter, ?, or a bracket.
struct GlobItem {
  size_t length;  // in the pattern
  bool matches;   // whether it matches the given character
};

// The bracket that opens at pattern[0]; length 0 if it has no closing bracket.
//   [!a-cx]    '!' negates;  a-c is a range, empty if reversed;  '-' at either end and ']' at the start are literals
GlobItem bracket(std::string_view pattern, char c) {
  const bool negated = pattern.size() > 1 && pattern[1] == '!';
  const size_t begin = negated ? 2 : 1;
  const size_t end = begin < pattern.size() ? pattern.find(']', begin + 1) : pattern.npos;
  if (end == pattern.npos) return {0, false};
  bool found = false;
  for (size_t i = begin; i < end;) {
    const bool range = i + 2 < end && pattern[i + 1] == '-';
    const auto low = static_cast<unsigned char>(pattern[i]), high = static_cast<unsigned char>(pattern[i + 2 * range]);
    const auto letter = static_cast<unsigned char>(c);
    found = found || (low <= letter && letter <= high);
    i += range ? 3 : 1;
  }
  return {end + 1, found != negated};
}

// Requires: pattern does not begin with '*'.
GlobItem first_item(std::string_view pattern, char c) {
  if (pattern[0] == '?') return {1, true};
  if (pattern[0] == '[')
    if (const auto item = bracket(pattern, c); item.length > 0) return item;
  return {1, pattern[0] == c};
}

using Segments = std::vector<std::string_view>;

Segments segments_of(std::string_view path) {
  Segments segments;
  if (path.empty()) return segments;
  for (size_t begin = 0;;) {
    const size_t dot = path.find('.', begin);
    segments.push_back(path.substr(begin, dot - begin));
    if (dot == path.npos) return segments;
    begin = dot + 1;
  }
}

// Whether the first `count` segments match.
bool prefix_matches(const Segments& pattern, const Segments& path, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (!glob_matches(pattern[i], path[i])) return false;
  return true;
}

}  // namespace

bool glob_matches(std::string_view pattern, std::string_view name) {
  // Backtracking to the last '*' is enough: if the rest matches later in the name, it does not help to extend an
  // earlier '*'.
  size_t p = 0, n = 0, after_star = pattern.npos, star_end = 0;
  while (n < name.size() || p < pattern.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      after_star = ++p;
      star_end = n;
      continue;
    }
    if (p < pattern.size() && n < name.size()) {
      if (const auto item = first_item(pattern.substr(p), name[n]); item.matches) {
        p += item.length;
        n++;
        continue;
      }
    }
    if (after_star == pattern.npos || star_end == name.size()) return false;
    n = ++star_end;
    p = after_star;
  }
  return true;
}

bool path_matches(std::string_view pattern, std::string_view path) {
  const auto wanted = segments_of(pattern), found = segments_of(path);
  return wanted.size() == found.size() && prefix_matches(wanted, found, found.size());
}

std::vector<std::string> matching_paths(std::string_view pattern, const std::vector<std::string>& paths) {
  std::vector<std::string> found;
  for (const auto& path : paths)
    if (path_matches(pattern, path)) found.push_back(path);
  return found;
}

std::string why_unmatched(std::string_view pattern, const std::vector<std::string>& paths) {
  const auto wanted = segments_of(pattern);
  // The deepest module that matches a prefix of the pattern.
  std::string parent;
  size_t depth = 0;
  for (const auto& path : paths) {
    const auto found = segments_of(path);
    if (found.size() <= depth || found.size() >= wanted.size()) continue;
    if (!prefix_matches(wanted, found, found.size())) continue;
    parent = path;
    depth = found.size();
  }
  std::vector<std::string> children;
  for (const auto& path : paths) {
    const auto found = segments_of(path);
    const bool below = parent.empty() || path.starts_with(parent + ".");
    if (below && found.size() == depth + 1) children.emplace_back(found.back());
  }
  constexpr size_t kShown = 12;
  if (children.size() > kShown) {
    children.resize(kShown);
    children.emplace_back("...");
  }
  const auto where = parent.empty() ? std::string("the module") : c10::str("'", parent, "'");
  auto text = c10::str("no child of ", where, " matches '", depth < wanted.size() ? wanted[depth] : "", "'; it has ",
                       children.empty() ? "none" : c10::Join(", ", children), ".");
  if (const auto names = nearest_names(std::string(pattern), paths); !names.empty())
    text += " Nearest names: " + c10::Join(", ", names);
  return text;
}

}  // namespace tessera
