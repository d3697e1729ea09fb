#include "tessera/base/nearest.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tessera {
namespace {

// Edit distance with swaps of neighbours, row by row: row[j] turns the first i letters of a into the first j of b.
size_t edits_between(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), row(b.size() + 1), next(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); i++) {
    next[0] = i;
    for (size_t j = 1; j <= b.size(); j++) {
      next[j] = std::min({row[j] + 1, next[j - 1] + 1, row[j - 1] + (a[i - 1] != b[j - 1])});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) next[j] = std::min(next[j], before[j - 2] + 1);
    }
    std::swap(before, row);
    std::swap(row, next);
  }
  return row[b.size()];
}

}  // namespace

std::vector<std::string> nearest(std::string_view wanted, const std::vector<std::string>& names, size_t count) {
  std::vector<std::pair<size_t, const std::string*>> found;
  for (const auto& name : names) {
    const size_t edits = edits_between(wanted, name);
    if (2 * edits <= std::max(wanted.size(), name.size())) found.emplace_back(edits, &name);
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& x, const auto& y) { return x.first < y.first; });
  std::vector<std::string> best;
  for (size_t i = 0; i < std::min(count, found.size()); i++) best.push_back(*found[i].second);
  return best;
}

std::string did_you_mean(std::string_view wanted, const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : nearest(wanted, names)) text += (text.empty() ? "did you mean '" : " or '") + name + "'";
  return text.empty() ? text : text + "?";
}

}  // namespace tessera
