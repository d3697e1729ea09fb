#pragma once
#include "tessera/nn/hooks.h"
#include "tessera/tensor_parallel/detail/module_plan.h"

namespace tessera {

// Registers the hooks of a style. A plain input becomes a DTensor with the placement that the style declares. All
// inputs are redistributed to the placements that the module needs, and its outputs to those that the style declares.
void attach_style_hooks(torch::nn::Module& module, const DeviceMesh& mesh, const ModulePlan& plan);

// Registers the hook of a Dropout that is not in the plan. It draws by global index (plain_dropout.h): all ranks drop
// the same elements of a replicated input. A distributed input keeps its placements.
void attach_dropout_hooks(torch::nn::Module& module, const DeviceMesh& mesh);

// The placements that the style declares for plain inputs and outputs of the module, by position. Empty: it declares
// none. One for all: a list of one (ColwiseParallel, RowwiseParallel, SequenceParallel).
Layouts declared_inputs(const ModulePlan& plan);
Layouts declared_outputs(const ModulePlan& plan);

}  // namespace tessera
