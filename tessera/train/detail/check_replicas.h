#pragma once
#include "tessera/mesh/device_mesh.h"

#include <torch/nn/module.h>

namespace tessera::train {

// Checks that replicated parameters are bit-identical across ranks, by comparing checksums over each mesh axis.
// Plain parameters must agree over every axis. DTensors must agree over the axes on which they are Replicate and over
// those that their mesh does not have. Costs three small collectives per axis.
// Throws CommError on all ranks, with the axis and the parameters that differ. `when` starts the message.
// Requires: every rank of the mesh calls it.
void check_replicas(const torch::nn::Module& module, const DeviceMesh& mesh, const std::string& when);

}  // namespace tessera::train
