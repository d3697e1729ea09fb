#pragma once
#include "tessera/comm/detail/watch/rank_status_table.h"

#include <memory>
#include <mutex>

namespace tessera::comm::watch {

// Records the last collective of one group into the row of this rank in the RankStatusTable.
class LastCollectiveRecorder {
 public:
  LastCollectiveRecorder(std::shared_ptr<RankStatusTable> table, int local_rank, int row, uint64_t group)
      : table_(std::move(table)), local_rank_(local_rank), row_(row), group_(group) {}
  void posted(CommKind kind, Family family, uint64_t sequence, int64_t bytes, c10::ScalarType dtype, const char* name);
  void set_waiting(bool waiting) { table_->set_waiting(local_rank_, row_, waiting); }

 private:
  std::shared_ptr<RankStatusTable> table_;
  const int local_rank_, row_;
  const uint64_t group_;
  std::mutex mutex_;
};

}  // namespace tessera::comm::watch
