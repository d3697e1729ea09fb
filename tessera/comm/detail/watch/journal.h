#pragma once
#include "tessera/comm/detail/watch/ledger.h"

#include <memory>
#include <mutex>

namespace tessera::comm::watch {

// Where the collectives of one group are written down; one for each rank and group.
class Journal {
 public:
  Journal(std::shared_ptr<Ledger> ledger, int place, int row, uint64_t group)
      : ledger_(std::move(ledger)), place_(place), row_(row), group_(group) {}
  void posted(Kind kind, Family family, uint64_t sequence, int64_t bytes, c10::ScalarType dtype, const char* name);
  void waits(bool yes) { ledger_->set_waits(place_, row_, yes); }

 private:
  std::shared_ptr<Ledger> ledger_;
  const int place_, row_;
  const uint64_t group_;
  std::mutex mutex_;
};

}  // namespace tessera::comm::watch
