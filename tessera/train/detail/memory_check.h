#pragma once
#include "tessera/train/config.h"

namespace tessera::train {

// Bytes that a rank needs at least: parameters, gradients, optimizer state, the batch and the logits of a micro-batch.
// Everything that can be sharded counts as sharded, so a config that fits is never above it.
double min_memory_bytes(const TrainConfig& config, int64_t ranks);

// Throws UsageError with the largest batch that can fit, if the config cannot fit into the memory of the device.
// `ranks_on_device`: ranks that share it, such as all ranks of a CPU.
// Requires: check(config, ranks) passes.
void check_memory(const TrainConfig& config, int64_t ranks, int64_t ranks_on_device);

}  // namespace tessera::train
