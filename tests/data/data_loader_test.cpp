// A loader over torch::data: the ranks together read the batches of one rank, and a position continues them.
#include "tessera/data/data_loader.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/data/datasets/base.h>

#include <mutex>
#include <vector>

namespace tessera::data {
namespace {

using testing::Rank;
using testing::run_ranks;
using Batches = std::vector<std::vector<int64_t>>;
constexpr size_t kSamples = 23;

// A batch is the list of its sample numbers.
struct Numbers : torch::data::datasets::BatchDataset<Numbers, std::vector<int64_t>> {
  std::vector<int64_t> get_batch(c10::ArrayRef<size_t> indices) override { return {indices.begin(), indices.end()}; }
  std::optional<size_t> size() const override { return kSamples; }
};

template <class Loader>
Batches read_epochs(Loader& loader, int epochs) {
  Batches batches;
  for (int epoch = 0; epoch < epochs; epoch++) {
    for (auto& batch : loader) batches.push_back(batch);
    batches.push_back({});  // the end of an epoch
  }
  return batches;
}

struct LoaderCase {
  bool shuffle;
  size_t workers;
  bool drop_last;
};
const LoaderCase kLoaderCases[] = {{true, 0, false}, {false, 0, true}, {true, 2, true}, {false, 2, false}};

auto make_loader(const LoaderCase& c) {
  const auto options = torch::data::DataLoaderOptions(8).workers(c.workers).drop_last(c.drop_last);
  return c.shuffle ? data::make_data_loader(Numbers(), options, 7)
                   : data::make_data_loader<torch::data::samplers::SequentialSampler>(Numbers(), options);
}

// The batches of all ranks, joined in rank order.
Batches read_on_ranks(int64_t n, const LoaderCase& c) {
  std::vector<Batches> parts(static_cast<size_t>(n));
  run_ranks(n, [&](Rank& me) {
    auto loader = make_loader(c);
    parts[static_cast<size_t>(me.rank)] = read_epochs(*loader, 2);
  });
  auto joined = parts[0];
  for (size_t r = 1; r < parts.size(); r++) {
    EXPECT_EQ(parts[r].size(), joined.size());
    for (size_t b = 0; b < joined.size(); b++) {
      EXPECT_EQ(parts[r][b].size(), parts[0][b].size());
      joined[b].insert(joined[b].end(), parts[r][b].begin(), parts[r][b].end());
    }
  }
  return joined;
}

TEST(DataLoader, RanksReadTheBatchesOfOneRank) {
  for (const auto& c : kLoaderCases) {
    const auto one = read_on_ranks(1, c);
    ASSERT_EQ(one.size(), c.drop_last ? 6U : 8U);
    std::vector<int64_t> seen(kSamples);
    for (size_t b = 0; !one[b].empty(); b++)
      for (const int64_t sample : one[b]) seen[static_cast<size_t>(sample)]++;
    for (const int64_t times : seen) EXPECT_LE(times, 1);
    EXPECT_EQ(c.shuffle, one[0] != one[one.size() / 2]);  // another order in the second epoch
    EXPECT_EQ(!c.shuffle, one[0] == (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
    for (const int64_t n : {2, 4}) {
      auto expected = one;
      for (auto& batch : expected) batch.resize(batch.size() - batch.size() % static_cast<size_t>(n));
      EXPECT_EQ(read_on_ranks(n, c), expected) << n << " ranks";
    }
  }
}

TEST(DataLoader, APositionContinues) {
  for (const auto& c : kLoaderCases)
    for (const int64_t n : {1, 4})
      run_ranks(n, [&](Rank&) {
        const auto all = read_epochs(*make_loader(c), 2);
        auto loader = make_loader(c);
        std::vector<int64_t> positions;  // after each batch, in the loop; and after each epoch
        for (int epoch = 0; epoch < 2; epoch++) {
          for (auto& batch : *loader) (void)batch, positions.push_back(loader->position());
          positions.push_back(loader->position());
          EXPECT_EQ(loader->epoch(), epoch + 1);
        }
        for (size_t at = 0; at < positions.size(); at++) {
          auto other = make_loader(c);
          other->set_position(positions[at]);
          int epochs = 0;
          for (size_t i = at + 1; i < all.size(); i++) epochs += all[i].empty();
          const Batches rest(all.begin() + static_cast<int64_t>(at) + 1, all.end());
          EXPECT_EQ(read_epochs(*other, epochs), rest) << "after batch " << at;
        }
      });
}

TEST(DataLoader, ALoopThatIsLeftStartsTheNextEpoch) {
  run_ranks(1, [&](Rank&) {
    auto loader = make_loader(kLoaderCases[0]), other = make_loader(kLoaderCases[0]);
    const auto all = read_epochs(*other, 2);
    for (auto& batch : *loader) {
      EXPECT_EQ(batch, all[0]);
      break;
    }
    for (auto& batch : *loader) {
      EXPECT_EQ(batch, all[4]);
      break;
    }
  });
}

TEST(DataLoader, Errors) {
  run_ranks(3, [&](Rank&) {
    EXPECT_ERROR(UsageError, data::make_data_loader(Numbers(), 8), "8", "not divisible by 3 ranks");
    EXPECT_ERROR(UsageError, data::make_data_loader(Numbers(), torch::data::DataLoaderOptions(30).drop_last(true)),
                 "23", "never fill");
    EXPECT_ERROR(UsageError, data::make_data_loader(Numbers(), 3)->set_position(-1), "-1");
  });
}

}  // namespace
}  // namespace tessera::data
