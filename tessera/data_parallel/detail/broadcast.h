#pragma once
#include "tessera/base/visit.h"
#include "tessera/comm/communicator.h"

namespace tessera::data_parallel {

// Copies the values of one rank of the group to all ranks, in place. Tensors of one dtype and device are sent in shared
// buffers of at most 250 MiB. Of a DTensor, the local tensor is sent.
void broadcast_from(int64_t rank_in_group, const Tensors& tensors, const comm::Group& group);
inline void broadcast_from_first(const Tensors& tensors, const comm::Group& group) {
  broadcast_from(0, tensors, group);
}

}  // namespace tessera::data_parallel
