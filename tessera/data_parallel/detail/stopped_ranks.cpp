#include "tessera/data_parallel/detail/stopped_ranks.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::data_parallel {

StoppedRanks::StoppedRanks(comm::Group group) : group_(std::move(group)) {
  // Equal on all ranks, because they create their reducers in the same order.
  id_ = group_->store()->add(c10::str("reducers/", group_->rank()), 1);
}

std::string StoppedRanks::key(int64_t rank) const { return c10::str("reducers/", id_, "/left/", rank); }

void StoppedRanks::record_stop(int64_t passes) noexcept {
  try {
    const auto text = std::to_string(passes);
    group_->store()->set(key(group_->rank()), std::vector<uint8_t>(text.begin(), text.end()));
  } catch (...) {  // NOLINT(bugprone-empty-catch): the store is closed, so no rank can read it
  }
}

std::string StoppedRanks::describe() const {
  std::string text;
  for (int64_t r = 0; r < group_->size(); r++) try {
      if (r == group_->rank() || !group_->store()->check({key(r)})) continue;
      const auto passes = group_->store()->get(key(r));
      text += c10::str("; rank ", group_->ranks()[static_cast<size_t>(r)], " stopped after ",
                       std::string(passes.begin(), passes.end()), " backward passes: give every rank as many batches");
    } catch (const std::exception&) {
      return text + "; the store does not respond";
    }
  return text;
}

}  // namespace tessera::data_parallel
