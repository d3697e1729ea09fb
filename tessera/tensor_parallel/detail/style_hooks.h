#pragma once
#include "tessera/nn/hooks.h"
#include "tessera/tensor_parallel/detail/module_plan.h"

namespace tessera {

// The hooks of a style: plain inputs are taken for what the style says they are, all inputs are moved to where the
// module wants them, and its outputs to where the style promises them.
void attach_style_hooks(torch::nn::Module& module, const DeviceMesh& mesh, const ModulePlan& work);

// For a Dropout that is not planned: a plain input counts as whole on every rank, so that all drop the same; a
// distributed one knows itself how it lies.
void attach_dropout_hooks(torch::nn::Module& module, const DeviceMesh& mesh);

}  // namespace tessera
