#pragma once
#include "tessera/pipelining/detail/schedules.h"
#include "tessera/train/config.h"

namespace tessera::train {

// Ranks, stages and microbatches of the pipeline of a config. Requires: check(config) passes, or only fails for them.
pipelining::PipelineShape pipeline_shape(const TrainConfig& config, const MeshShape& mesh);

// Whether the first and the last stage of the model use one parameter: a tied embedding.
bool has_tied_embedding(const models::Config& config);

}  // namespace tessera::train
