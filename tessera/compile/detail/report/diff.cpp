#include "tessera/compile/detail/report/diff.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

namespace tessera::compiler {
namespace {

struct Match {
  size_t before, after;
};

// Lines that are there once in both texts, in the order of the second.
std::vector<Match> unique_matches(const std::vector<std::string>& before, const std::vector<std::string>& after) {
  struct Place {
    int in_before = 0, in_after = 0;
    size_t before = 0;
  };
  std::unordered_map<std::string_view, Place> places;
  for (size_t i = 0; i < before.size(); i++) {
    auto& place = places[before[i]];
    place.in_before++;
    place.before = i;
  }
  for (const auto& line : after) places[line].in_after++;
  std::vector<Match> matches;
  for (size_t i = 0; i < after.size(); i++) {
    const auto& place = places[after[i]];
    if (place.in_before == 1 && place.in_after == 1) matches.push_back({place.before, i});
  }
  return matches;
}

// The most of them that have the same order in both: a longest increasing subsequence.
std::vector<Match> in_order(const std::vector<Match>& matches) {
  std::vector<size_t> ends;  // ends[k]: of the chains of k + 1 matches, the end that lies earliest in `before`
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
  std::vector<Match> chain;
  for (auto m = ends.empty() ? -1 : static_cast<int64_t>(ends.back()); m >= 0; m = link[static_cast<size_t>(m)])
    chain.push_back(matches[static_cast<size_t>(m)]);
  std::reverse(chain.begin(), chain.end());
  return chain;
}

}  // namespace

std::vector<DiffLine> diff_lines(const std::vector<std::string>& before, const std::vector<std::string>& after) {
  std::vector<DiffLine> lines;
  size_t b = 0, a = 0;
  const auto gap = [&](size_t b_end, size_t a_end) {  // equal lines at both its ends, which are there more than once
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
