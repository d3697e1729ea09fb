#include "tessera/data/data_loader.h"

#include "tessera/base/error.h"
#include "tessera/data/detail/permutation.h"
#include "tessera/data/detail/splitmix64.h"

#include <algorithm>

namespace tessera::data::detail {

LoaderPosition::LoaderPosition(int64_t samples, int64_t batch, bool shuffle, bool drop_last, uint64_t seed,
                               const GroupRef& group)
    : samples_(samples),
      batch_(batch),
      shuffle_(shuffle),
      drop_last_(drop_last),
      seed_(seed),
      rank_(group->rank()),
      ranks_(group->size()) {
  TESSERA_CHECK(samples >= 1, UsageError, "make_data_loader: the data set has no samples, or no size()");
  TESSERA_CHECK(batch >= 1 && batch % ranks_ == 0, UsageError, "make_data_loader: a batch of ", batch,
                " samples is not divisible by ", ranks_, " ranks; the batch size counts the samples of all ranks");
  TESSERA_CHECK(samples >= (drop_last ? batch : ranks_), UsageError, "make_data_loader: the data set has ", samples,
                " samples, which never fill a batch of ", drop_last ? batch : ranks_, " on ", ranks_, " ranks");
}

void LoaderPosition::finish_epoch() { delivered_ = (requested_ / (samples_ + 1) + 1) * (samples_ + 1); }

void LoaderPosition::start_epoch() {
  if (!continues_ && delivered_ % (samples_ + 1) != 0)
    delivered_ = (epoch() + 1) * (samples_ + 1);  // the loop was left
  continues_ = false;
  requested_ = delivered_;
  requested_batches_.clear();
}

std::optional<std::vector<size_t>> LoaderPosition::next() {
  const int64_t epoch = requested_ / (samples_ + 1), first = requested_ % (samples_ + 1);
  int64_t count = std::min(batch_, samples_ - first);
  if (drop_last_ && count < batch_) return std::nullopt;
  count -= count % ranks_;
  if (count == 0) return std::nullopt;
  requested_ += count;
  requested_batches_.push_back(requested_);
  const Permutation order(samples_, splitmix64(seed_, static_cast<uint64_t>(epoch)));
  std::vector<size_t> rows;
  const int64_t own = count / ranks_;
  for (int64_t i = first + rank_ * own; i < first + (rank_ + 1) * own; i++)
    rows.push_back(static_cast<size_t>(shuffle_ ? order(i) : i));
  return rows;
}

void LoaderPosition::count_delivered() {
  TESSERA_CHECK(!requested_batches_.empty(), InternalError, "a loader delivered a batch that was not requested");
  delivered_ = requested_batches_.front();
  requested_batches_.pop_front();
}

void LoaderPosition::set_position(int64_t position) {
  TESSERA_CHECK(position >= 0, UsageError, "DataLoader::set_position: position is ", position,
                "; it must be at least 0");
  delivered_ = position;
  continues_ = true;
}

void LoaderSampler::save(torch::serialize::OutputArchive& /*archive*/) const {
  TESSERA_FAIL(UsageError, "a loader of ts::data::make_data_loader is saved by ts::TrainingState, or by position()");
}
void LoaderSampler::load(torch::serialize::InputArchive& /*archive*/) {
  TESSERA_FAIL(UsageError,
               "a loader of ts::data::make_data_loader is restored by ts::TrainingState, or by set_position()");
}

}  // namespace tessera::data::detail
