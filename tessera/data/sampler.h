#pragma once
#include <cstdint>
#include <vector>

// Which samples are read when. It depends on the seed, the epoch and the place in the epoch alone: not on how many
// ranks there are.
namespace tessera::data {

constexpr int64_t kEndless = -1;  // samples of a data set that is generated
constexpr int64_t kPadding = -1;  // a row of a batch that holds no sample

// What becomes of samples at the end of an epoch that do not fill a batch. The same on all ranks.
enum class LastBatch : uint8_t {
  Drop,  // they are passed over; another order brings others next time
  Pad,   // their batch is filled up with rows that do not count
};

struct SamplerOptions {
  int64_t samples = kEndless;
  int64_t batch = 1;  // samples of a step, over all ranks
  uint64_t seed = 0;
  bool shuffle = true;  // each epoch in an order of its own. Endless data are read in order.
  LastBatch last = LastBatch::Drop;

  bool operator==(const SamplerOptions&) const = default;
};

// A batch over all ranks.
//
//   batch 6, 3 ranks      rows  | 12 4 | 9 0 | 7 -1 |      rank 1 takes rows 2 and 3
struct GlobalBatch {
  std::vector<int64_t> rows;  // samples, kPadding at the end
  int64_t epoch = 0;

  int64_t samples() const;  // without padding
  // The rows of one of `ranks`, in order. Requires: the ranks divide the batch.
  std::vector<int64_t> rows_of(int64_t rank, int64_t ranks) const;
  bool operator==(const GlobalBatch&) const = default;
};

class Sampler {
 public:
  // Throws UsageError for a batch that is never full.
  explicit Sampler(const SamplerOptions& options);

  GlobalBatch next();
  // Samples gone by since the start, dropped ones included. A sampler that is set to it goes on where this one is, also
  // with another batch size and for another number of ranks.
  int64_t position() const { return position_; }
  void set_position(int64_t position);
  const SamplerOptions& options() const { return options_; }

 private:
  SamplerOptions options_;
  int64_t position_ = 0;
};

}  // namespace tessera::data
