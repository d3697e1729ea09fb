#include "tessera/comm/detail/watch/journal.h"

#include <cstring>

namespace tessera::comm::watch {

void Journal::posted(Kind kind, Family family, uint64_t sequence, int64_t bytes, c10::ScalarType dtype,
                     const char* name) {
  Entry entry;
  entry.group = group_;
  entry.sequence = sequence;
  entry.bytes = bytes;
  entry.kind = kind;
  entry.family = family;
  entry.dtype = dtype;
  std::strncpy(entry.tensor_name, name, sizeof(entry.tensor_name) - 1);
  std::lock_guard lock(mutex_);
  ledger_->write(place_, row_, entry);
}

}  // namespace tessera::comm::watch
