#pragma once
#include <cstdint>
#include <vector>

// Chooses the samples of each batch. The choice depends only on the seed, the epoch and the position in the epoch, not
// on the number of ranks. So training can resume on another number of ranks.
namespace tessera::data {

// Number of samples of a generated dataset without end.
constexpr int64_t kEndless = -1;
// A batch row without a sample.
constexpr int64_t kPadding = -1;

// What happens to the last samples of an epoch if they do not fill a batch. It is equal on all ranks.
enum class LastBatch : uint8_t {
  Drop,  // skips them; with shuffle, the next epoch skips others
  Pad,   // fills the batch with padding rows, which the loss ignores
};

// Options of Sampler.
struct SamplerOptions {
  int64_t samples = kEndless;        // of the dataset
  int64_t batch = 1;                 // global batch size: samples per step over all ranks
  uint64_t seed = 0;                 // of the shuffle
  bool shuffle = true;               // a new order in each epoch; endless datasets are read in order
  LastBatch last = LastBatch::Drop;  // see LastBatch

  // Compares all options.
  bool operator==(const SamplerOptions&) const = default;
};

// A batch over all ranks.
//
//   batch 6, 3 ranks      rows  | 12 4 | 9 0 | 7 -1 |      rank 1 has rows 2 and 3
struct GlobalBatch {
  std::vector<int64_t> rows;  // sample numbers; kPadding at the end
  int64_t epoch = 0;          // of the samples

  // Number of samples, without padding.
  int64_t samples() const;
  // The rows of one rank, in order. Requires: `ranks` divides the batch size.
  std::vector<int64_t> rows_of(int64_t rank, int64_t ranks) const;
  // Compares rows and epoch.
  bool operator==(const GlobalBatch&) const = default;
};

// Iterates over global batches (PyTorch: DistributedSampler and BatchSampler in one).
// Example:  data::Sampler sampler({.samples = dataset.samples(), .batch = 32});
//           auto batch = data::read_batch(dataset, sampler.next().rows_of(rank, ranks));
class Sampler {
 public:
  // Throws UsageError if the samples never fill a batch.
  explicit Sampler(const SamplerOptions& options);

  // The next batch. Starts a new epoch after the last one.
  GlobalBatch next();
  // Number of samples since the start, dropped ones included. Another sampler that is set to this position continues
  // here, also with another batch size or number of ranks.
  int64_t position() const { return position_; }
  // Continues at a position of another sampler.
  void set_position(int64_t position);
  // The options of the constructor.
  const SamplerOptions& options() const { return options_; }

 private:
  SamplerOptions options_;
  int64_t position_ = 0;
};

}  // namespace tessera::data
