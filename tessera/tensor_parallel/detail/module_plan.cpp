#include "tessera/tensor_parallel/detail/module_plan.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/meta.h"
#include "tessera/nn/attention_heads.h"
#include "tessera/nn/detail/hookable.h"
#include "tessera/nn/module_tree.h"
#include "tessera/nn/detail/rms_norm.h"
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
// What treats the features of one position, or each number, together: it must know how a piece lies.
bool wants_layout(const Module& m) {
  return is_any_of<torch::nn::DropoutImpl, torch::nn::LayerNormImpl, nn::RMSNormImpl>(m);
}

// Which parameters a style cuts, by kind of module. The way of cutting (blocks, sections) is the style's.
struct Row {
  bool (*applies)(const Module&);
  const char* parameter;
  int cut_dim;  // -1: whole
  bool cuts_output;
};
constexpr Row kColwise[] = {
    {is_linear, "weight", 0, true}, {is_linear, "bias", 0, true}, {is_embedding, "weight", 1, true}};
constexpr Row kRowwise[] = {
    {is_linear, "weight", 1, false}, {is_linear, "bias", -1, false}, {is_embedding, "weight", 0, false}};

// The way in which features are cut, along dim 0.
Placement way_of(const ColwiseParallel& style, const std::string& path) {
  TESSERA_CHECK(
      style.sections.sizes.empty() ||
          std::equal(style.sections.sizes.begin() + 1, style.sections.sizes.end(), style.sections.sizes.begin()),
      UsageError, "module '", path, "': sections=", style.sections,
      ": sections of different sizes cannot be cut in one weight; make them modules of their own (wq, wk, wv)");
  TESSERA_CHECK(style.sections.count == 1 || style.block == 1, UsageError, "module '", path,
                "': sections=", style.sections, " with block=", style.block,
                ": sections are cut evenly, between whole features; choose ",
                "a number of ranks that divides the heads, and leave the block out");
  return style.sections.count > 1 ? StridedShard(0, style.sections.count) : Shard(0, style.block);
}
Placement way_of(const RowwiseParallel& style, const std::string&) { return Shard(0, style.block); }

std::vector<int64_t> coordinate_in(const DeviceMesh& mesh) {
  auto coordinate = mesh.get_coordinate();
  TESSERA_CHECK(coordinate, UsageError, "parallelize_module: this rank is not in ", mesh);
  return *coordinate;
}

ParameterPlan work_on(const std::string& path, const std::string& name, const at::Tensor& parameter,
                      const DeviceMesh& mesh, Placement placement, bool communicates) {
  TESSERA_CHECK(!is_dtensor(parameter), UsageError, "module '", path, "' is parallelised already: its ", name, " is ",
                is_dtensor(parameter) ? detail::meta_of(parameter).spec->describe() : std::string(),
                ". Give parallelize_module all of the plan at once");
  ParameterPlan work;
  work.name = name;
  work.placement = placement;
  work.sizes = parameter.sizes().vec();
  const auto local = local_sizes({placement}, mesh.shape(), coordinate_in(mesh), parameter.sizes());
  work.local_sizes.assign(local.begin(), local.end());
  work.local_bytes = static_cast<int64_t>(parameter.element_size()) * c10::multiply_integers(work.local_sizes);
  work.communicates = communicates;
  return work;
}

std::string divisors(int64_t n) {
  std::string text;
  for (int64_t d = 1; d <= n; d++)
    if (n % d == 0) text += (text.empty() ? "" : ", ") + std::to_string(d);
  return text;
}

// `features` are `heads` whole heads; may n ranks cut them this way?
void check_heads(const std::string& path, const AttentionHeads& heads, const Placement& way, int64_t features,
                 int64_t n) {
  const int64_t width = heads.head_dim();
  const int64_t sections = way.kind == Placement::Kind::StridedShard ? way.factor : 1;
  const int64_t each = features / sections, count = each / width;
  if (each % width != 0 || count % n == 0) return;
  if (way.is_shard() && way.factor % width == 0) return;
  TESSERA_FAIL(UsageError, "module '", path, "' has ", count, " heads of ", width, " features, and ", n,
               " ranks would cut through a head. Use ", divisors(count), " ranks",
               sections == 1 ? c10::str(", or block=", width, " in its style, which leaves some ranks fewer heads")
                             : std::string());
}

const AttentionHeads* heads_around(Module& root, const std::string& path) {
  const auto dot = path.rfind('.');
  if (path.empty()) return nullptr;
  return dynamic_cast<const AttentionHeads*>(
      get_submodule(root, dot == path.npos ? std::string_view() : std::string_view(path).substr(0, dot)).get());
}

class ModulePlanner {
 public:
  ModulePlanner(Module& root, const DeviceMesh& mesh) : root_(root), mesh_(mesh) {}

  ModulePlan operator()(const std::string& path, const Style& style) {
    ModulePlan work;
    work.path = path;
    work.style = style;
    const auto module = get_submodule(root_, path);
    work.kind = class_name(*module);
    std::visit([&](const auto& s) { fill(work, *module, s); }, style);
    return work;
  }

 private:
  template <size_t rows, class S>
  void cut_parameters(ModulePlan& work, Module& module, const Row (&table)[rows], const S& style, const char* name) {
    const auto way = way_of(style, work.path);
    const auto parameters = module.named_parameters(/*recurse=*/false);
    bool known = false;
    for (const auto& row : table) {
      if (!row.applies(module)) continue;
      known = true;
      const auto* parameter = parameters.find(row.parameter);
      if (!parameter) continue;  // no bias
      const auto placement = row.cut_dim < 0 ? Replicate() : way.with_dim(row.cut_dim);
      work.parameters.push_back(work_on(work.path, row.parameter, *parameter, mesh_, placement, true));
      if (row.cut_dim < 0 || parameter->dim() < 2) continue;
      const auto features = parameter->size(row.cut_dim);
      if (const auto* heads = heads_around(root_, work.path); heads && is_linear(module))
        check_heads(work.path, *heads, way, features, mesh_.size());
      TESSERA_CHECK(way.is_shard() || features % (way.factor * mesh_.size()) == 0, UsageError, "module '", work.path,
                    "': ", way.factor, " sections of ", features / way.factor, " features do not divide by ",
                    mesh_.size(), " ranks; sections are cut evenly");
    }
    TESSERA_CHECK(known, UsageError, "module '", work.path, "', a ", work.kind, ": ", name,
                  " knows Linear and Embedding. Use a Prepare style for its inputs and outputs, or distribute_module");
    if (const auto* linear = dynamic_cast<const torch::nn::LinearImpl*>(&module))
      work.in_features = linear->options.in_features();
  }

  void fill(ModulePlan& work, Module& module, const ColwiseParallel& style) {
    cut_parameters(work, module, kColwise, style, "ColwiseParallel");
    work.output_sharding = way_of(style, work.path).with_dim(-1);
    work.hooked = can_be_hooked(root_, work.path);
    if (!work.hooked && !style.input_layouts.is_replicate()) hookable(root_, work.path);  // says why not
  }
  void fill(ModulePlan& work, Module& module, const RowwiseParallel& style) {
    cut_parameters(work, module, kRowwise, style, "RowwiseParallel");
    if (is_linear(module)) work.input_sharding = way_of(style, work.path).with_dim(-1);
    work.hooked = can_be_hooked(root_, work.path);
    if (!work.hooked && !(is_embedding(module) && style.input_layouts.is_replicate())) hookable(root_, work.path);
  }
  void fill(ModulePlan& work, Module& module, const SequenceParallel&) {
    for (const auto& item : module.named_parameters(/*recurse=*/false))
      work.parameters.push_back(work_on(work.path, item.key(), *item, mesh_, Replicate(), false));
    need_hook(work);
  }
  template <class Prepare>
  void fill(ModulePlan& work, Module&, const Prepare&) {
    need_hook(work);
  }
  void need_hook(const ModulePlan& work) {
    if (!can_be_hooked(root_, work.path)) hookable(root_, work.path);  // says why not
  }

  Module& root_;
  const DeviceMesh& mesh_;
};

// Modules between one that gives its piece of the features and one that takes it, in order of registration:
//
//   up = colwise    drop    down = rowwise           drop sees a part of each position
//
// A planned one is told whose part it is; one that is not planned, and needs to know, is refused.
void pass_shardings_between(Module& root, std::vector<ModulePlan>& works) {
  const auto planned = [&](const std::string& path) -> ModulePlan* {
    const auto at = std::find_if(works.begin(), works.end(), [&](const ModulePlan& w) { return w.path == path; });
    return at == works.end() ? nullptr : &*at;
  };
  for (const auto& parent : root.named_modules()) {
    const ModulePlan* open = nullptr;  // the colwise module whose piece is under way
    std::string unaware;               // a module since then that is not planned
    std::string unaware_is;            // its kind
    for (const auto& child : parent.value()->named_children()) {
      const auto path = parent.key().empty() ? child.key() : parent.key() + "." + child.key();
      auto* work = planned(path);
      const auto* colwise = work ? std::get_if<ColwiseParallel>(&work->style) : nullptr;
      const auto* rowwise = work ? std::get_if<RowwiseParallel>(&work->style) : nullptr;
      if (colwise && colwise->use_local_output && colwise->output_layouts.is_sharded()) {
        open = work;
        unaware.clear();
      } else if (rowwise && rowwise->input_layouts.is_sharded()) {
        TESSERA_CHECK(unaware.empty(), UsageError, "module '", unaware, "', a ", unaware_is, ", stands between '",
                      open->path, "', which gives each rank its piece of the features, and '", path,
                      "', which takes it: it would see pieces and not know whose. Give it an entry in the plan that ",
                      "says how they lie, such as '", unaware,
                      " = prepare_input_output(input_from=S(-1), input_to=S(-1), output_from=S(-1), output_to=S(-1))'");
        open = nullptr;
      } else if (open && work) {
        work->input_sharding = work->output_sharding = open->output_sharding;
        work->in_features = open->parameters[0].sizes[0];
      } else if (open && wants_layout(*child.value())) {
        unaware = path;
        unaware_is = class_name(*child.value());
      }
    }
  }
}

}  // namespace

std::vector<ModulePlan> resolve_plan(Module& root, const DeviceMesh& mesh, const Plan& plan, Unmatched unmatched) {
  TESSERA_CHECK(mesh.ndim() == 1, UsageError, "parallelize_module needs a mesh of one axis, and ", mesh, " has ",
                mesh.ndim(), ": name the one to use, as in mesh[\"tp\"]");
  std::vector<std::string> paths;
  for (const auto& item : root.named_modules()) paths.push_back(item.key());
  ModulePlanner work(root, mesh);
  std::vector<ModulePlan> works;
  for (const auto& [path, entry] : resolve(plan, paths, unmatched)) works.push_back(work(path, plan[entry].style));
  pass_shardings_between(root, works);
  return works;
}

std::vector<std::string> unplanned_dropouts(Module& root, const std::vector<ModulePlan>& works) {
  std::vector<std::string> found;
  for (const auto& item : root.named_modules()) {
    const auto* dropout = dynamic_cast<const torch::nn::DropoutImpl*>(item.value().get());
    if (!dropout || dropout->options.p() == 0) continue;
    if (std::any_of(works.begin(), works.end(), [&](const auto& w) { return w.path == item.key(); })) continue;
    TESSERA_CHECK(can_be_hooked(root, item.key()), UsageError, "module '", item.key(),
                  "', a Dropout beside parallelised modules, must drop the same on every rank, and that takes a hook. ",
                  "Declare it as tessera::nn::Dropout in place of torch::nn::Dropout");
    found.push_back(item.key());
  }
  return found;
}

std::ostream& operator<<(std::ostream& out, const ModulePlan& work) {
  out << (work.path.empty() ? "(root)" : work.path) << "  " << work.kind << "  " << work.style;
  for (const auto& p : work.parameters)
    out << "  " << p.name << " " << at::IntArrayRef(p.sizes) << " -> " << p.placement << " "
        << at::IntArrayRef(p.local_sizes);
  return out;
}

}  // namespace tessera
