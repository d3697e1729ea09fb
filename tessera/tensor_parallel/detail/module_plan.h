#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/tensor_parallel/plan.h"

#include <torch/nn/module.h>

#include <iosfwd>
#include <string>
#include <vector>

// A plan resolved for the modules of a model: what parallelize_module will do. Resolving checks everything and changes
// nothing.
namespace tessera {

// What happens to one parameter.
struct ParameterPlan {
  std::string name;  // within its module: "weight"
  Placement placement;
  std::vector<int64_t> sizes, local_sizes;  // global; on this rank
  int64_t local_bytes = 0;
  bool communicates = true;  // the source rank sends the values; false: each rank uses its own

  bool operator==(const ParameterPlan&) const = default;
};

// What happens to one module.
struct ModulePlan {
  std::string path;
  std::string kind;  // the class: "Linear"
  Style style;
  std::vector<ParameterPlan> parameters;
  // The placement of the input and output features; R if they are not sharded or the style does not define it. S(-1) in
  // a style means this placement.
  Placement input_sharding, output_sharding;
  // The global size of the last dim of an input that is sharded along it. 0: unknown; local sizes are assumed equal.
  int64_t in_features = 0;
  bool hooked = true;  // false: a typed member of torch::nn, which has no hooks and works through its placements alone

  bool operator==(const ModulePlan&) const = default;
};

// Resolves a plan. Throws UsageError for: a mesh that is not 1-D; a pattern that matches no module, or a module that
// two patterns match; a style that does not support the module's class; a module that is distributed already; a head
// that would be split; a module that needs a hook and cannot have one; a Dropout or norm that would receive local
// features without a style.
std::vector<ModulePlan> resolve_plan(torch::nn::Module& root, const DeviceMesh& mesh, const Plan& plan,
                                     Unmatched unmatched = Unmatched::Throw);

// The Dropouts with p > 0 that are not in the plan. Their inputs are replicated, so all ranks must drop the same
// elements; LibTorch's random numbers differ between processes. Throws UsageError for one that cannot have a hook.
std::vector<std::string> unplanned_dropouts(torch::nn::Module& root, const std::vector<ModulePlan>& plans);

// Prints one line: path, class, style, parameters with global and local sizes.
std::ostream& operator<<(std::ostream& out, const ModulePlan& plan);

}  // namespace tessera
