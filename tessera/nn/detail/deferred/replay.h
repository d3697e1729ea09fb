#pragma once
#include "tessera/nn/detail/deferred/tape.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <optional>

// Runs recorded ops.
namespace tessera::detail::deferred {

// Computes the values on their recorded devices, or all of them on `device`. Values with one storage share memory.
// If this throws, `running_op` is the op that threw.
std::vector<at::Tensor> replay(const Tape& tape, const std::vector<Id>& values, std::optional<c10::Device> device = {},
                               Id* running_op = nullptr);

// Computes the local shard of one value by running its ops on local shards, without memory for the full tensor. nullopt
// if some op does not support that (see shard_replay.h).
std::optional<at::Tensor> replay_shard(const Tape& tape, Id value, const TensorSpec& spec, c10::Device device);

}  // namespace tessera::detail::deferred
