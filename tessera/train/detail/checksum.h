#pragma once
#include "tessera/mesh/device_mesh.h"

#include <torch/nn/module.h>

namespace tessera::train {

// Compares, over each axis of the mesh, the parameters that ought to be the same along it, to the bit: plain ones along
// every axis, distributed ones along those they are whole on or not laid out over. Three small collectives an axis.
// Throws CommError, on all ranks, that names the axis and the parameters that differ.
// Requires: every rank of the mesh calls it.
void check_replicas(const torch::nn::Module& module, const DeviceMesh& mesh, const std::string& when);

}  // namespace tessera::train
