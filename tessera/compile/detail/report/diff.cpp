#include "tessera/compile/detail/report/diff.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

namespace tessera::compiler {
namespace {

struct LineMatch {
  size_t before, after;
};

// Lines that occur exactly once in each text, in the order of the second.
std::vector<LineMatch> unique_matches(const std::vector<std::string>& before, const std::vector<std::string>& after) {
  struct Occurrences {
    int in_before = 0, in_after = 0;
    size_t before = 0;
  };
  std::unordered_map<std::string_view, Occurrences> lines;
  for (size_t i = 0; i < before.size(); i++) {
    auto& found = lines[before[i]];
    found.in_before++;
    found.before = i;
  }
  for (const auto& line : after) lines[line].in_after++;
  std::vector<LineMatch> matches;
  for (size_t i = 0; i < after.size(); i++) {
    const auto& found = lines[after[i]];
    if (found.in_before == 1 && found.in_after == 1) matches.push_back({found.before, i});
  }
  return matches;
}

// The largest subset with the same order in both texts: a longest increasing subsequence.
std::vector<LineMatch> in_order(const std::vector<LineMatch>& matches) {
  std::vector<size_t> ends;  // ends[k]: the last match of the chain of k + 1 matches that ends earliest in `before`
  std::vector<int64_t> link(matches.size(), -1);
  for (size_t m = 0; m < matches.size(); m++) {
    const auto at = std::lower_bound(ends.begin(), ends.end(), matches[m].before,
                                     [&](size_t end, size_t line) { return matches[end].before < line; });
    if (at != ends.begin()) link[m] = static_cast<int64_t>(*(at - 1));
    if (at == ends.end())
      ends.push_back(m);
    else
      *at = m;
  }
  std::vector<LineMatch> chain;
  for (auto m = ends.empty() ? -1 : static_cast<int64_t>(ends.back()); m >= 0; m = link[static_cast<size_t>(m)])
    chain.push_back(matches[static_cast<size_t>(m)]);
  std::reverse(chain.begin(), chain.end());
  return chain;
}

}  // namespace

std::vector<DiffLine> diff_lines(const std::vector<std::string>& before, const std::vector<std::string>& after) {
  std::vector<DiffLine> lines;
  size_t b = 0, a = 0;
  const auto gap = [&](size_t b_end, size_t a_end) {  // matches equal lines at both ends, which occur more than once
    for (; b < b_end && a < a_end && before[b] == after[a]; b++, a++) lines.push_back({DiffLine::Kind::Same, a});
    size_t tail = 0;
    while (tail < std::min(b_end - b, a_end - a) && before[b_end - 1 - tail] == after[a_end - 1 - tail]) tail++;
    for (; b < b_end - tail; b++) lines.push_back({DiffLine::Kind::Removed, b});
    for (; a < a_end - tail; a++) lines.push_back({DiffLine::Kind::Added, a});
    for (; a < a_end; b++, a++) lines.push_back({DiffLine::Kind::Same, a});
  };
  for (const auto& match : in_order(unique_matches(before, after))) {
    gap(match.before, match.after);
    lines.push_back({DiffLine::Kind::Same, a});
    b++, a++;
  }
  gap(before.size(), after.size());
  return lines;
}

}  // namespace tessera::compiler
