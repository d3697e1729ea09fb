#pragma once
#include "tessera/train/detail/parallel_model.h"

namespace tessera::train {

// Checks that replicated parameters are bit-identical across ranks, by comparing checksums over each mesh axis.
// Plain parameters must agree over every axis. DTensors must agree over the axes on which they are Replicate and over
// those that their mesh does not have. Experts must agree over edp and tp. Pipeline stages are not compared with each
// other. Costs three small collectives per axis.
// Throws CommError on all ranks, with the axis and the parameters that differ. `when` starts the message.
// Requires: every rank of the mesh calls it.
void check_replicas(const ParallelModel& model, const std::string& when);

}  // namespace tessera::train
