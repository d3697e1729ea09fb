#include "tessera/data_parallel/detail/stopped_ranks.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::data_parallel {

Departures::Departures(comm::Group group) : group_(std::move(group)) {
  id_ = group_->store()->add(c10::str("reducers/", group_->rank()), 1);  // ranks make them in the same order
}

std::string Departures::key(int64_t rank) const { return c10::str("reducers/", id_, "/left/", rank); }

void Departures::leave(int64_t passes) noexcept {
  try {
    const auto text = std::to_string(passes);
    group_->store()->set(key(group_->rank()), std::vector<uint8_t>(text.begin(), text.end()));
  } catch (...) {  // NOLINT(bugprone-empty-catch): the store went first, so nobody can ask any more
  }
}

std::string Departures::say() const {
  std::string text;
  for (int64_t r = 0; r < group_->size(); r++) try {
      if (r == group_->rank() || !group_->store()->check({key(r)})) continue;
      const auto passes = group_->store()->get(key(r));
      text += c10::str("; rank ", group_->ranks()[static_cast<size_t>(r)], " stopped after ",
                       std::string(passes.begin(), passes.end()), " backward passes: give every rank as many batches");
    } catch (const std::exception&) {
      return text + "; the store does not answer";
    }
  return text;
}

}  // namespace tessera::data_parallel
