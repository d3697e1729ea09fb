#include "tessera/tensor_parallel/detail/module_plan.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/meta.h"
#include "tessera/nn/attention_heads.h"
#include "tessera/nn/detail/hookable.h"
#include "tessera/nn/detail/rms_norm.h"
#include "tessera/nn/module_tree.h"
#include "tessera/placement/detail/shard.h"

#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <ostream>

namespace tessera {
namespace {

using torch::nn::Module;

template <class... Impl>
bool is_any_of(const Module& module) {
  return ((dynamic_cast<const Impl*>(&module) != nullptr) || ...);
}
bool is_linear(const Module& m) { return is_any_of<torch::nn::LinearImpl>(m); }
bool is_embedding(const Module& m) { return is_any_of<torch::nn::EmbeddingImpl>(m); }
// Modules whose result depends on the global features or element positions. They need the placement of their input.
bool needs_placement(const Module& m) {
  return is_any_of<torch::nn::DropoutImpl, torch::nn::LayerNormImpl, nn::RMSNormImpl>(m);
}

// The dim along which a style shards a parameter. The style defines blocks and sections.
struct ParameterRule {
  bool (*applies)(const Module&);
  const char* parameter;
  int shard_dim;  // -1: replicated
};
constexpr ParameterRule kColwise[] = {{is_linear, "weight", 0}, {is_linear, "bias", 0}, {is_embedding, "weight", 1}};
constexpr ParameterRule kRowwise[] = {{is_linear, "weight", 1}, {is_linear, "bias", -1}, {is_embedding, "weight", 0}};

// The placement of the sharded features, with dim 0.
Placement feature_placement(const ColwiseParallel& style, const std::string& path) {
  TESSERA_CHECK(
      style.sections.sizes.empty() ||
          std::equal(style.sections.sizes.begin() + 1, style.sections.sizes.end(), style.sections.sizes.begin()),
      UsageError, "module '", path, "': sections=", style.sections,
      ": sections of different sizes cannot be sharded in one weight; make them separate modules (wq, wk, wv)");
  return style.sections.count > 1 ? StridedShard(0, style.sections.count, style.block) : Shard(0, style.block);
}
Placement feature_placement(const RowwiseParallel& style, const std::string&) { return Shard(0, style.block); }

std::vector<int64_t> coordinate_in(const DeviceMesh& mesh) {
  auto coordinate = mesh.get_coordinate();
  TESSERA_CHECK(coordinate, UsageError, "parallelize_module: this rank is not in ", mesh);
  return *coordinate;
}

ParameterPlan plan_parameter(const std::string& path, const std::string& name, const at::Tensor& parameter,
                             const DeviceMesh& mesh, Placement placement, bool communicates) {
  TESSERA_CHECK(!is_dtensor(parameter), UsageError, "module '", path, "' is parallelized already: its ", name, " is ",
                is_dtensor(parameter) ? detail::meta_of(parameter).spec->describe() : std::string(),
                ". Pass the entire plan to one call of parallelize_module");
  ParameterPlan plan;
  plan.name = name;
  plan.placement = placement;
  plan.sizes = parameter.sizes().vec();
  const auto local = local_sizes({placement}, mesh.shape(), coordinate_in(mesh), parameter.sizes());
  plan.local_sizes.assign(local.begin(), local.end());
  plan.local_bytes = static_cast<int64_t>(parameter.element_size()) * c10::multiply_integers(plan.local_sizes);
  plan.communicates = communicates;
  return plan;
}

// The numbers of ranks, up to 1024, that divide n.
std::string divisors(int64_t n) {
  std::string text;
  for (int64_t d = 1; d <= std::min<int64_t>(n, 1024); d++)
    if (n % d == 0) text += (text.empty() ? "" : ", ") + std::to_string(d);
  return text;
}

// Throws if n ranks would split a head of the features with this placement.
void check_heads(const std::string& path, const AttentionHeads& heads, const Placement& placement, int64_t features,
                 int64_t n) {
  const int64_t width = heads.head_dim();
  const int64_t sections = placement.kind == Placement::Kind::StridedShard ? placement.factor : 1;
  const int64_t each = features / sections, count = each / width;
  if (each % width != 0 || count % n == 0) return;
  const int64_t block = placement.is_shard() ? placement.factor : placement.block;
  if (block % width == 0) return;
  TESSERA_FAIL(UsageError, "module '", path, "' has ", count, " heads of ", width, " features, and ", n,
               " ranks would split a head. Use ", divisors(count), " ranks, or block=", width,
               " in its style, which gives some ranks fewer heads");
}

const AttentionHeads* attention_parent(Module& root, const std::string& path) {
  const auto dot = path.rfind('.');
  if (path.empty()) return nullptr;
  return dynamic_cast<const AttentionHeads*>(
      get_submodule(root, dot == path.npos ? std::string_view() : std::string_view(path).substr(0, dot)).get());
}

class ModulePlanner {
 public:
  ModulePlanner(Module& root, const DeviceMesh& mesh) : root_(root), mesh_(mesh) {}

  ModulePlan operator()(const std::string& path, const Style& style) {
    ModulePlan plan;
    plan.path = path;
    plan.style = style;
    const auto module = get_submodule(root_, path);
    plan.kind = class_name(*module);
    std::visit([&](const auto& s) { fill(plan, *module, s); }, style);
    return plan;
  }

 private:
  template <size_t n, class S>
  void shard_parameters(ModulePlan& plan, Module& module, const ParameterRule (&rules)[n], const S& style,
                        const char* name) {
    const auto features_placement = feature_placement(style, plan.path);
    const auto parameters = module.named_parameters(/*recurse=*/false);
    bool known = false;
    for (const auto& rule : rules) {
      if (!rule.applies(module)) continue;
      known = true;
      const auto* parameter = parameters.find(rule.parameter);
      if (!parameter) continue;  // bias=false
      const auto placement = rule.shard_dim < 0 ? Replicate() : features_placement.with_dim(rule.shard_dim);
      plan.parameters.push_back(plan_parameter(plan.path, rule.parameter, *parameter, mesh_, placement, true));
      if (rule.shard_dim < 0 || parameter->dim() < 2) continue;
      const auto features = parameter->size(rule.shard_dim);
      if (const auto* heads = attention_parent(root_, plan.path); heads && is_linear(module))
        check_heads(plan.path, *heads, features_placement, features, mesh_.size());
      if (!features_placement.is_shard()) check_sections(plan.path, features_placement, features);
    }
    TESSERA_CHECK(known, UsageError, "module '", plan.path, "', a ", plan.kind, ": ", name,
                  " supports Linear and Embedding. Use a Prepare style for its inputs and outputs, or ",
                  "distribute_module");
    if (const auto* linear = dynamic_cast<const torch::nn::LinearImpl*>(&module))
      plan.in_features = linear->options.in_features();
  }

  void check_sections(const std::string& path, const Placement& placement, int64_t features) const {
    const int64_t sections = placement.factor, block = placement.block, n = mesh_.size();
    TESSERA_CHECK(features % sections == 0 && features / sections % block == 0, UsageError, "module '", path,
                  "': ", features, " features are not ", sections, " equal sections",
                  block > 1 ? c10::str(" of complete blocks of ", block) : std::string());
    TESSERA_CHECK(block > 1 || features % (sections * n) == 0, UsageError, "module '", path, "': ", sections,
                  " sections of ", features / sections, " features are not divisible by ", n,
                  " ranks; write block = the features of a head, which gives some ranks fewer heads");
  }

  void fill(ModulePlan& plan, Module& module, const ColwiseParallel& style) {
    shard_parameters(plan, module, kColwise, style, "ColwiseParallel");
    plan.output_sharding = feature_placement(style, plan.path).with_dim(-1);
    plan.hooked = can_be_hooked(root_, plan.path);
    // Without hooks the output is the DTensor that the sharded weight gives. Any other style would only fail in
    // forward.
    const bool without_hooks = style.input_layouts.is_replicate() && style.output_layouts.is_sharded() &&
                               style.output_layouts.dim == -1 && !style.use_local_output;
    if (!without_hooks)
      need_hook(plan,
                ", or write use_local_output = false with the default layouts, which returns a DTensor without a hook");
  }
  void fill(ModulePlan& plan, Module& module, const RowwiseParallel& style) {
    shard_parameters(plan, module, kRowwise, style, "RowwiseParallel");
    if (is_linear(module)) plan.input_sharding = feature_placement(style, plan.path).with_dim(-1);
    need_hook(plan);
  }
  void fill(ModulePlan& plan, Module& module, const SequenceParallel&) {
    for (const auto& item : module.named_parameters(/*recurse=*/false))
      plan.parameters.push_back(plan_parameter(plan.path, item.key(), *item, mesh_, Replicate(), false));
    need_hook(plan);
  }
  template <class Prepare>
  void fill(ModulePlan& plan, Module&, const Prepare&) {
    need_hook(plan);
  }
  void need_hook(const ModulePlan& plan, const char* or_else = "") {
    if (!can_be_hooked(root_, plan.path)) fail_not_hookable(root_, plan.path, or_else);
  }

  Module& root_;
  const DeviceMesh& mesh_;
};

// Handles modules between a colwise module that returns local features and a rowwise module that takes them, in the
// order of registration:
//
//   up = colwise    drop    down = rowwise           drop receives local features
//
// A module in the plan gets the sharding of the features. A module that is not in the plan but needs it is an error.
void pass_shardings_between(Module& root, std::vector<ModulePlan>& plans) {
  const auto planned = [&](const std::string& path) -> ModulePlan* {
    const auto at = std::find_if(plans.begin(), plans.end(), [&](const ModulePlan& p) { return p.path == path; });
    return at == plans.end() ? nullptr : &*at;
  };
  for (const auto& parent : root.named_modules()) {
    const ModulePlan* open = nullptr;  // the last colwise module whose local features no rowwise module took yet
    std::string unplanned;             // a module after it that is not in the plan
    std::string unplanned_class;
    for (const auto& child : parent.value()->named_children()) {
      const auto path = parent.key().empty() ? child.key() : parent.key() + "." + child.key();
      auto* plan = planned(path);
      const auto* colwise = plan ? std::get_if<ColwiseParallel>(&plan->style) : nullptr;
      const auto* rowwise = plan ? std::get_if<RowwiseParallel>(&plan->style) : nullptr;
      if (colwise && colwise->use_local_output && colwise->output_layouts.is_sharded()) {
        open = plan;
        unplanned.clear();
      } else if (rowwise && rowwise->input_layouts.is_sharded()) {
        TESSERA_CHECK(unplanned.empty(), UsageError, "module '", unplanned, "', a ", unplanned_class, ", is between '",
                      open->path, "', which returns local features, and '", path,
                      "', which takes them: it would receive local features without their placement. Add an entry to ",
                      "the plan, such as '", unplanned,
                      " = prepare_input_output(input_from=S(-1), input_to=S(-1), output_from=S(-1), output_to=S(-1))'");
        open = nullptr;
      } else if (open && plan) {
        plan->input_sharding = plan->output_sharding = open->output_sharding;
        plan->in_features = open->parameters[0].sizes[0];
      } else if (open && needs_placement(*child.value())) {
        unplanned = path;
        unplanned_class = class_name(*child.value());
      }
    }
  }
}

}  // namespace

std::vector<ModulePlan> resolve_plan(Module& root, const DeviceMesh& mesh, const Plan& plan, Unmatched unmatched) {
  TESSERA_CHECK(mesh.ndim() == 1, UsageError, "parallelize_module needs a 1-D mesh, and ", mesh, " has ", mesh.ndim(),
                " axes: select one, as in mesh[\"tp\"]");
  std::vector<std::string> paths;
  for (const auto& item : root.named_modules()) paths.push_back(item.key());
  ModulePlanner planner(root, mesh);
  std::vector<ModulePlan> plans;
  for (const auto& [path, entry] : resolve(plan, paths, unmatched)) plans.push_back(planner(path, plan[entry].style));
  pass_shardings_between(root, plans);
  return plans;
}

std::vector<std::string> unplanned_dropouts(Module& root, const std::vector<ModulePlan>& plans) {
  std::vector<std::string> found;
  for (const auto& item : root.named_modules()) {
    const auto* dropout = dynamic_cast<const torch::nn::DropoutImpl*>(item.value().get());
    if (!dropout || dropout->options.p() == 0) continue;
    if (std::any_of(plans.begin(), plans.end(), [&](const auto& p) { return p.path == item.key(); })) continue;
    TESSERA_CHECK(can_be_hooked(root, item.key()), UsageError, "module '", item.key(),
                  "', a Dropout next to parallelized modules, needs a hook to drop the same elements on every rank. ",
                  "Declare it as tessera::nn::Dropout instead of torch::nn::Dropout");
    found.push_back(item.key());
  }
  return found;
}

std::ostream& operator<<(std::ostream& out, const ModulePlan& plan) {
  out << (plan.path.empty() ? "(root)" : plan.path) << "  " << plan.kind << "  " << plan.style;
  for (const auto& p : plan.parameters)
    out << "  " << p.name << " " << at::IntArrayRef(p.sizes) << " -> " << p.placement << " "
        << at::IntArrayRef(p.local_sizes);
  return out;
}

}  // namespace tessera
