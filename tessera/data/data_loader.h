#pragma once
#include "tessera/comm/collectives.h"

#include <torch/data/dataloader.h>
#include <torch/data/samplers/random.h>
#include <torch/data/samplers/sequential.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

// torch::data::make_data_loader for data-parallel training: each rank reads its part of every batch, and the position
// in the epoch can be saved and restored, on another number of ranks too.
//
//   auto loader = ts::data::make_data_loader(std::move(dataset), 64);      // was torch::data::make_data_loader
//   for (auto& batch : *loader) ...                                        // 64 / ranks samples on each rank
//   ts::TrainingState state{model, optimizer, *loader};
namespace tessera::data {

namespace detail {

// Which samples this rank reads next. The loader and its sampler share it. A position is
//   epoch * (samples + 1) + samples of this epoch that all ranks together have got
// so that the end of an epoch, inside of the caller's loop, is not the start of the next one.
class LoaderPosition {
 public:
  LoaderPosition(int64_t samples, int64_t batch, bool shuffle, bool drop_last, uint64_t seed, const GroupRef& group);

  // Starts an epoch: the next one, or the one in which set_position() is.
  void start_epoch();
  // The samples of this rank in the next batch; none after the last batch of the epoch.
  std::optional<std::vector<size_t>> next();
  // The oldest batch that next() returned and that was not counted is delivered to the caller.
  void count_delivered();
  // The caller's loop has ended.
  void finish_epoch();

  int64_t position() const { return delivered_; }
  void set_position(int64_t position);
  int64_t epoch() const { return delivered_ / (samples_ + 1); }
  int64_t local_batch() const { return batch_ / ranks_; }

 private:
  int64_t samples_, batch_;  // of the data set; of a batch over all ranks
  bool shuffle_, drop_last_;
  uint64_t seed_;
  int64_t rank_, ranks_;
  int64_t delivered_ = 0, requested_ = 0;       // positions of the caller and of the workers, who are ahead
  bool continues_ = false;                      // set_position() was called after the last epoch
  std::deque<int64_t> requested_batches_ = {};  // `requested_` after each batch that is not yet delivered
};

// The sampler that a torch::data loader owns.
class LoaderSampler final : public torch::data::samplers::Sampler<> {
 public:
  explicit LoaderSampler(std::shared_ptr<LoaderPosition> position) : position_(std::move(position)) {}
  void reset(std::optional<size_t> /*new_size*/ = std::nullopt) override { position_->start_epoch(); }
  std::optional<std::vector<size_t>> next(size_t /*batch_size*/) override { return position_->next(); }
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  std::shared_ptr<LoaderPosition> position_;
};

}  // namespace detail

// A data loader; see make_data_loader. Iterating over it once is one epoch.
template <class Dataset>
class DataLoader {
  using Loader = torch::data::StatelessDataLoader<Dataset, detail::LoaderSampler>;
  using BatchIterator = torch::data::Iterator<typename Loader::BatchType>;

 public:
  // See make_data_loader.
  DataLoader(Dataset dataset, const torch::data::DataLoaderOptions& options,
             std::shared_ptr<detail::LoaderPosition> position)
      : position_(position), loader_(std::move(dataset), detail::LoaderSampler(position), options) {}

  // An input iterator over batches.
  class Iterator {
   public:
    using Batch = typename Loader::BatchType;  // what the data set returns
    // Of a loader; used by begin() and end().
    Iterator(DataLoader& loader, BatchIterator at) : loader_(&loader), at_(std::move(at)) {}
    // The batch.
    Batch& operator*() { return *at_; }
    Batch* operator->() { return &*at_; }
    // Goes on to the next batch.
    Iterator& operator++() {
      ++at_;
      counted_ = false;
      return *this;
    }
    // Compares with end().
    bool operator!=(Iterator& end) {
      const bool more = at_ != end.at_;
      if (!more) loader_->position_->finish_epoch();
      if (more && !counted_) loader_->position_->count_delivered();
      counted_ = more;
      return more;
    }

   private:
    DataLoader* loader_;
    BatchIterator at_;
    bool counted_ = false;
  };
  // Starts an epoch. After set_position() in the middle of an epoch, continues this epoch.
  Iterator begin() { return {*this, loader_.begin()}; }
  // The end of the epoch.
  Iterator end() { return {*this, loader_.end()}; }

  // The epoch and the samples of it that all ranks have got, as one number for set_position().
  int64_t position() const { return position_->position(); }
  // Continues at a position of another loader of the same data set and seed.
  void set_position(int64_t position) { position_->set_position(position); }
  // The number of the epoch: 0 in the first one, 1 when its loop has ended.
  int64_t epoch() const { return position_->epoch(); }

 private:
  std::shared_ptr<detail::LoaderPosition> position_;
  Loader loader_;
};

// A loader of this rank's part of each batch. `options` has the batch size over all ranks, and the number of workers,
// as in torch::data. The order of samples depends on `seed` and the epoch only, not on the number of ranks.
// Kind: torch::data::samplers::RandomSampler or SequentialSampler. If the last batch of an epoch is smaller, all ranks
// get equal parts of it, and up to ranks - 1 samples are skipped. `group` has the ranks that read different samples,
// for example {mesh, "dp"}; {} is all ranks. No communication. Throws UsageError if the batch size is not divisible by
// the number of ranks.
template <class Kind = torch::data::samplers::RandomSampler, class Dataset>
std::unique_ptr<DataLoader<Dataset>> make_data_loader(Dataset dataset, torch::data::DataLoaderOptions options = {},
                                                      uint64_t seed = 0, const GroupRef& group = {}) {
  constexpr bool shuffle = std::is_same_v<Kind, torch::data::samplers::RandomSampler>;
  static_assert(shuffle || std::is_same_v<Kind, torch::data::samplers::SequentialSampler>,
                "make_data_loader: the sampler is RandomSampler or SequentialSampler");
  auto position = std::make_shared<detail::LoaderPosition>(static_cast<int64_t>(dataset.size().value_or(0)),
                                                           static_cast<int64_t>(options.batch_size()), shuffle,
                                                           options.drop_last(), seed, group);
  options.batch_size(static_cast<size_t>(position->local_batch()));
  return std::make_unique<DataLoader<Dataset>>(std::move(dataset), options, std::move(position));
}

}  // namespace tessera::data
