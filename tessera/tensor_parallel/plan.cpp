#include "tessera/tensor_parallel/plan.h"

#include "tessera/base/detail/warn_once.h"
#include "tessera/base/error.h"
#include "tessera/tensor_parallel/detail/glob.h"

#include <unordered_map>

namespace tessera {

Plan::Plan(std::initializer_list<Entry> entries) {
  for (const auto& entry : entries) add(entry.pattern, entry.style);
}

Plan& Plan::add(std::string pattern, Style style) {
  const auto* existing = find(pattern);
  TESSERA_CHECK(!existing, UsageError, "plan entry '", pattern, "': the new style is ", to_string(style),
                ", but the pattern already has ", to_string(*existing), "; use one style per pattern");
  check(style);
  entries_.push_back({std::move(pattern), std::move(style)});
  return *this;
}

const Style* Plan::find(std::string_view pattern) const {
  for (const auto& entry : entries_)
    if (entry.pattern == pattern) return &entry.style;
  return nullptr;
}

std::vector<PlannedModule> resolve(const Plan& plan, const std::vector<std::string>& paths, Unmatched unmatched) {
  std::vector<PlannedModule> planned;
  std::unordered_map<std::string, size_t> matched;  // module -> entry
  for (size_t i = 0; i < plan.size(); i++) {
    const auto& [pattern, style] = plan[i];
    const auto matches = matching_paths(pattern, paths);
    if (matches.empty()) {
      const auto why = c10::str("plan entry '", pattern, "' matches no module: ", why_unmatched(pattern, paths));
      TESSERA_CHECK(unmatched == Unmatched::Warn, UsageError, why);
      warn_once("plan/" + pattern, why + " The entry is skipped.");
    }
    for (const auto& path : matches) {
      const auto [before, is_new] = matched.emplace(path, i);
      TESSERA_CHECK(is_new, UsageError, "module '", path, "' matches two entries, '", plan[before->second].pattern,
                    "' = ", to_string(plan[before->second].style), " and '", pattern, "' = ", to_string(style),
                    "; a module has one style: narrow one of the patterns");
      planned.push_back({path, i});
    }
  }
  return planned;
}

}  // namespace tessera
