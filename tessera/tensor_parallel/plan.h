#pragma once
#include "tessera/tensor_parallel/style.h"

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Which modules get which style: patterns over module paths (glob.h), in order. A value; plan_text.h writes and reads
// it.
//
// Example:  Plan plan = {{"layers.*.attn.w[qkv]", ColwiseParallel()}, {"layers.*.attn.wo", RowwiseParallel()}};
//           Plan of_the_module_itself = ColwiseParallel();
class Plan {
 public:
  struct Entry {
    std::string pattern;  // "" is the module itself
    Style style;
    bool operator==(const Entry&) const = default;
  };

  Plan() = default;
  Plan(std::initializer_list<Entry> entries);  // NOLINT
  template <IsStyle S>
  Plan(S style) {  // NOLINT
    add("", Style(std::move(style)));
  }

  // Throws UsageError, and stays as it was, for a pattern that is there already or a style that check() refuses.
  Plan& add(std::string pattern, Style style);

  const Style* find(std::string_view pattern) const;  // as it was written; null: not there
  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }
  auto begin() const { return entries_.begin(); }
  auto end() const { return entries_.end(); }
  const Entry& operator[](size_t i) const { return entries_[i]; }
  bool operator==(const Plan&) const = default;

 private:
  std::vector<Entry> entries_;
};

// What to do about a pattern that matches no module.
enum class Unmatched : uint8_t { Throw, Warn };  // PyTorch warns, and goes on without it

// A module that the plan speaks of.
struct PlannedModule {
  std::string path;
  size_t entry;  // of the plan
  bool operator==(const PlannedModule&) const = default;
};

// Entry by entry, each with its modules in the order of `paths`; those are all modules as named_modules() lists them,
// with "" for the module itself. Pure: nothing is changed yet.
// Throws UsageError for a module that two entries match, and for a pattern that matches none (see Unmatched).
std::vector<PlannedModule> resolve(const Plan& plan, const std::vector<std::string>& paths,
                                   Unmatched unmatched = Unmatched::Throw);

}  // namespace tessera
