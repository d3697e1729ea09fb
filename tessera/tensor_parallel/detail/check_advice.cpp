#include "tessera/tensor_parallel/detail/check_advice.h"

#include "tessera/nn/module_tree.h"
#include "tessera/tensor_parallel/detail/glob.h"

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <functional>
#include <numeric>

namespace tessera {
namespace {

Plan with_style(const Plan& plan, size_t entry, const Style& style) {
  Plan changed;
  for (size_t i = 0; i < plan.size(); i++) changed.add(plan[i].pattern, i == entry ? style : plan[i].style);
  return changed;
}

std::optional<size_t> entry_of(const Plan& plan, const std::string& path) {
  for (size_t i = 0; i < plan.size(); i++)
    if (!matching_paths(plan[i].pattern, {path}).empty()) return i;
  return std::nullopt;
}

// Appends the plans with another style for one entry.
struct StyleRepairs {
  const Plan& plan;
  size_t entry;
  std::vector<PlanRepair>& repairs;

  void operator()(const ColwiseParallel& s) const {
    for (const int64_t sections : {3, 2, 4}) {
      if (sections == s.sections.count) continue;
      auto changed = s;
      changed.sections = sections;
      add(changed, c10::str("its output is sharded on dim -1 in ", sections,
                            " sections (a fused weight); add .sections = ", sections));
    }
    if (s.sections.count > 1) {
      auto changed = s;
      changed.sections = 1;
      add(changed, "its output features are not a fused weight; remove .sections");
    }
    if (!s.output_layouts.is_replicate()) {
      auto changed = s;
      changed.output_layouts = Replicate();
      add(changed, "the code after it needs all features; write .output_layouts = Replicate()");
    }
    if (!s.input_layouts.is_replicate()) {
      auto changed = s;
      changed.input_layouts = Replicate();
      add(changed, "its plain input is replicated; write .input_layouts = Replicate()");
    }
    add(RowwiseParallel(), "it takes local features; write RowwiseParallel()");
  }
  void operator()(const RowwiseParallel& s) const {
    if (!s.input_layouts.is_replicate()) {
      auto changed = s;
      changed.input_layouts = Replicate();
      add(changed, "its plain input is replicated, not a shard; write .input_layouts = Replicate()");
    }
    if (!s.input_layouts.is_sharded()) {
      auto changed = s;
      changed.input_layouts = Shard(-1);
      add(changed, "its plain input is a shard of the features; write .input_layouts = Shard(-1)");
    }
    if (!s.output_layouts.is_replicate()) {
      auto changed = s;
      changed.output_layouts = Replicate();
      add(changed, "the code after it needs the full output; write .output_layouts = Replicate()");
    }
    add(ColwiseParallel(), "it takes replicated features; write ColwiseParallel()");
  }
  void operator()(const SequenceParallel& s) const {
    auto changed = s;
    changed.use_local_output = false;
    if (s.use_local_output) add(changed, "write .use_local_output = false");
  }
  template <class Prepare>
  void operator()(const Prepare&) const {}

  void add(const Style& style, const std::string& advice) const {
    if (style == plan[entry].style) return;
    repairs.push_back({with_style(plan, entry, style), plan[entry].pattern, advice});
  }
};

void add_missing_entries(Module& root, const Plan& plan, const std::string& path, std::vector<PlanRepair>& repairs) {
  const auto module = get_submodule(root, path);
  const auto add = [&](const Style& style, const std::string& advice) {
    auto changed = plan;
    changed.add(path, style);
    repairs.push_back({std::move(changed), path, advice});
  };
  const auto entry = [&](const std::string& style) {
    return c10::str("add {\"", path, "\", ", style, "} to the plan");
  };
  if (dynamic_cast<const torch::nn::LinearImpl*>(module.get())) {
    add(RowwiseParallel(), "it receives local features; " + entry("RowwiseParallel()"));
    add(ColwiseParallel{.output_layouts = Replicate()},
        "it receives a distributed tensor; " + entry("ColwiseParallel{.output_layouts = Replicate()}"));
  } else if (!module->named_parameters(/*recurse=*/false).is_empty()) {
    add(SequenceParallel(), "it receives a tensor that is sharded along the sequence; " + entry("SequenceParallel()"));
  }
  const Layouts sharded = Shard(-1);
  add(PrepareModuleInputOutput{.input_layouts = sharded,
                               .desired_input_layouts = sharded,
                               .output_layouts = sharded,
                               .desired_output_layouts = sharded},
      "it receives local features and needs their placement; " +
          entry("PrepareModuleInputOutput with Shard(-1) in all four layouts"));
}

int64_t element_count(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// The index of the one element that differs; nullopt if there is not exactly one.
std::optional<size_t> only_difference(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  if (a.size() != b.size()) return std::nullopt;
  std::optional<size_t> found;
  for (size_t i = 0; i < a.size(); i++) {
    if (a[i] == b[i]) continue;
    if (found) return std::nullopt;
    found = i;
  }
  return found;
}

std::string list_of(const std::vector<int64_t>& sizes, char open = '[', char close = ']') {
  return c10::str(open, c10::Join(", ", sizes), close);
}

}  // namespace

std::vector<PlanRepair> plan_repairs(Module& root, const Plan& plan, const std::string& path,
                                     const std::vector<std::string>& before) {
  constexpr size_t kMostEntries = 6;  // that are changed; each change costs a forward and a backward
  std::vector<PlanRepair> repairs;
  std::vector<size_t> changed;
  const auto change = [&](const std::string& module) {
    const auto entry = entry_of(plan, module);
    if (!entry || changed.size() == kMostEntries || std::find(changed.begin(), changed.end(), *entry) != changed.end())
      return;
    changed.push_back(*entry);
    std::visit(StyleRepairs{plan, *entry, repairs}, plan[*entry].style);
  };
  if (!entry_of(plan, path) && !path.empty()) add_missing_entries(root, plan, path, repairs);
  change(path);
  for (const auto& module : before) change(module);
  return repairs;
}

std::optional<ViewAdvice> view_advice(const std::vector<ViewCall>& plain, const std::vector<ViewCall>& found,
                                      bool last_one_failed) {
  for (size_t i = 0; i < std::min(plain.size(), found.size()); i++) {
    const auto& a = plain[i];
    const auto& b = found[i];
    if (a.path != b.path) return std::nullopt;
    const auto from = only_difference(a.from, b.from);
    if (!from) continue;
    const auto call = c10::str("view(", list_of(b.to, '{', '}'), ") on a local tensor ", list_of(b.from));
    const auto sizes = a.resolved();
    const auto local = b.resolved();
    const bool fails = last_one_failed && i + 1 == found.size() && element_count(local) != element_count(b.from);
    if (fails) {
      return ViewAdvice{b.path, c10::str(call, " is not possible; the plain module has ", list_of(a.from),
                                         ". Write -1 for the dim that is sharded (the number of heads), or divide it ",
                                         "by the number of ranks")};
    }
    const auto to = only_difference(sizes, local);
    if (!to || *to == 0 || sizes.size() <= a.from.size()) continue;
    // The sharded dim is split in several: its outermost part must become smaller, not an inner one.
    const auto outer = *to - 1;
    if (outer < *from || sizes[outer] <= 1 || local[*to] >= sizes[*to]) continue;
    return ViewAdvice{b.path, c10::str(call, " gives ", list_of(local), ", where the plain module has ", list_of(sizes),
                                       ": dim ", *to, " (the head dim) is divided, but dim ", outer,
                                       " (the heads) is sharded. Write -1 for dim ", outer, " and ", sizes[*to],
                                       " for dim ", *to, ", or divide dim ", outer, " by the number of ranks")};
  }
  return std::nullopt;
}

}  // namespace tessera
