#pragma once
#include "tessera/base/visit.h"
#include "tessera/comm/communicator.h"

namespace tessera::data_parallel {

// Gives every rank of the group the values of its first one, in place. Tensors of one dtype and device travel together,
// in pieces of at most 250 MiB. Of distributed ones, this rank's pieces.
void broadcast_from_first(const Tensors& tensors, const comm::Group& group);

}  // namespace tessera::data_parallel
