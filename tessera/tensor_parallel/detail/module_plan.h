#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/tensor_parallel/plan.h"

#include <torch/nn/module.h>

#include <iosfwd>
#include <string>
#include <vector>

// What a plan does to a module, worked out and checked in full before anything is changed.
namespace tessera {

struct ParameterPlan {
  std::string name;  // of the module's own: "weight"
  Placement placement;
  std::vector<int64_t> sizes, local_sizes;  // local: this rank's
  int64_t local_bytes = 0;
  bool communicates = true;  // values come from the source rank; else each rank keeps its own

  bool operator==(const ParameterPlan&) const = default;
};

struct ModulePlan {
  std::string path;
  std::string kind;  // "Linear"
  Style style;
  std::vector<ParameterPlan> parameters;
  // How features are cut, in and out; R where they are whole or the style does not know. What S(-1) in a style means.
  Placement input_sharding, output_sharding;
  // Of how many features an input cut along the last dim is a piece; 0: not known, and pieces are taken to be equal.
  int64_t in_features = 0;
  bool hooked = true;  // false: a plain typed member, which works through its placements alone

  bool operator==(const ModulePlan&) const = default;
};

// Throws UsageError, and nothing has happened, for: a mesh that is not 1-D; a name that matches nothing or twice; a
// style that does not know the module's type; a module that is distributed already; a cut through a head; a module
// that needs a hook and cannot have one; a Dropout or norm that would see pieces and is not told.
std::vector<ModulePlan> resolve_plan(torch::nn::Module& root, const DeviceMesh& mesh, const Plan& plan,
                                 Unmatched unmatched = Unmatched::Throw);

// The Dropouts that drop something and are not planned. They see what is whole on every rank and must drop the same
// everywhere, while LibTorch's own random numbers are others in each process. Throws UsageError for one that cannot
// have a hook.
std::vector<std::string> unplanned_dropouts(torch::nn::Module& root, const std::vector<ModulePlan>& works);

// One line a module: path, kind, style, parameters with local sizes, bytes.
std::ostream& operator<<(std::ostream& out, const ModulePlan& work);

}  // namespace tessera
