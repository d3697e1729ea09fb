#include "tessera/comm/detail/watch/last_collective_recorder.h"

#include <cstring>

namespace tessera::comm::watch {

void LastCollectiveRecorder::posted(CommKind kind, Family family, uint64_t sequence, int64_t bytes,
                                    c10::ScalarType dtype, const char* name) {
  LastCollective collective;
  collective.group = group_;
  collective.sequence = sequence;
  collective.bytes = bytes;
  collective.kind = kind;
  collective.family = family;
  collective.dtype = dtype;
  std::strncpy(collective.tensor_name, name, sizeof(collective.tensor_name) - 1);
  std::lock_guard lock(mutex_);
  table_->write(local_rank_, row_, collective);
}

}  // namespace tessera::comm::watch
