#pragma once
#include "tessera/nn/detail/deferred/tape.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <optional>

// Doing what was written down.
namespace tessera::detail::deferred {

// The values, real, on the devices where they would have been, or all on `device`. Those on one storage share memory.
// If it throws, `under_way` is the step that did.
std::vector<at::Tensor> replay(const Tape& tape, const std::vector<Id>& values, std::optional<c10::Device> device = {},
                               Id* under_way = nullptr);

// This rank's piece of one value, with no more memory than that: its recipe runs on pieces. Only where every step is
// such that piece by piece and whole give the same bits; none otherwise.
std::optional<at::Tensor> replay_shard(const Tape& tape, Id value, const TensorSpec& spec, c10::Device device);

}  // namespace tessera::detail::deferred
