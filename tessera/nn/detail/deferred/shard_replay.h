#pragma once
#include "tessera/nn/detail/deferred/tape.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <vector>

// Which recipes can run on a rank's piece of a tensor alone, and how their arguments look there.
//
// The values of such a recipe are of the target's sizes, and each is kept as this rank's piece; or they are a row of
// one, which a rank has or has not. The result must have the bits of a run on one rank: so fills, copies, and
// arithmetic that IEEE rounds in one way only. exp, cos or pow are not among it: LibTorch's vector code and its code
// for the elements left over may differ in the last bit, and a piece leaves other elements over than the whole.
namespace tessera::detail::deferred {

bool can_replay_on_shard(const Tape& tape, const std::vector<Id>& steps, c10::IntArrayRef sizes);

// Turns the arguments of a step into those of this rank. False: there is nothing to do here, the row is elsewhere.
bool localize_arguments(const Step& step, const TensorSpec& spec, std::vector<c10::IValue>& arguments);

}  // namespace tessera::detail::deferred
