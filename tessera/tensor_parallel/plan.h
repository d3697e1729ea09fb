#pragma once
#include "tessera/tensor_parallel/detail/style.h"

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// A tensor-parallel plan (PyTorch: the parallelize_plan dict): patterns for module names, each with a style. The order
// of the entries is kept. A pattern uses * ? and [abc] within one level of the dotted name: "layers.*.attn.w[qkv]". A
// plan can also be written as text: parse_plan and to_string (detail/plan_text.h).
//
// Example:  Plan plan = {{"layers.*.attn.w[qkv]", ColwiseParallel()}, {"layers.*.attn.wo", RowwiseParallel()}};
//           Plan for_the_root_module = ColwiseParallel();
class Plan {
 public:
  // A pattern and the style of the modules that match it.
  struct Entry {
    std::string pattern;  // "" is the root module
    Style style;
    bool operator==(const Entry&) const = default;
  };

  // An empty plan, or one with these entries.
  Plan() = default;
  Plan(std::initializer_list<Entry> entries);  // NOLINT
  // A plan for the root module only.
  template <IsStyle S>
  Plan(S style) {  // NOLINT
    add("", Style(std::move(style)));
  }

  // Throws UsageError, and does not change the plan, if the pattern exists already or check() rejects the style.
  Plan& add(std::string pattern, Style style);

  // The entries, in order.
  const Style* find(std::string_view pattern) const;  // compares the text of patterns; null: not found
  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }
  const Entry& operator[](size_t i) const { return entries_[i]; }
  bool operator==(const Plan&) const = default;

 private:
  std::vector<Entry> entries_;
};

// What to do if a pattern matches no module. PyTorch warns and skips the entry.
enum class Unmatched : uint8_t { Throw, Warn };

// A module that an entry of the plan matches.
struct PlannedModule {
  std::string path;
  size_t entry;  // the index of the entry in the plan
  bool operator==(const PlannedModule&) const = default;
};

// The modules that the plan matches: entry by entry, each in the order of `paths`. `paths` are the names of
// named_modules(), with "" for the root. Throws UsageError for a module that two entries match, and for a pattern that
// matches no module (see Unmatched).
std::vector<PlannedModule> resolve(const Plan& plan, const std::vector<std::string>& paths,
                                   Unmatched unmatched = Unmatched::Throw);

}  // namespace tessera

#include "tessera/tensor_parallel/detail/plan_text.h"  // parse_plan, parse_style, to_string; needs Plan
