#include "tessera/base/detail/nearest_names.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tessera {
namespace {

// Number of letters that are changed, added, removed, or exchanged with the next one (optimal string alignment). Rows
// of the table:  row[j] = edits from the first i letters of `a` to the first j letters of `b`
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> before, last, row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); i++) {
    before = std::exchange(last, row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); j++) {
      const size_t changed = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({changed, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

}  // namespace

std::vector<std::string> nearest_names(const std::string& name, const std::vector<std::string>& known, size_t most) {
  std::vector<std::pair<size_t, std::string>> found;
  for (const auto& other : known) {
    const size_t letters = distance(name, other);
    if (2 * letters <= std::max(name.size(), other.size())) found.emplace_back(letters, other);
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(most, found.size()); i++) names.push_back(found[i].second);
  return names;
}

std::string did_you_mean(const std::string& name, const std::vector<std::string>& known) {
  const auto names = nearest_names(name, known);
  if (names.empty()) return "";
  std::string text = "did you mean ";
  for (size_t i = 0; i < names.size(); i++)
    text += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + ("'" + names[i] + "'");
  return text + "?";
}

}  // namespace tessera
