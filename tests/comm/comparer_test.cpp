// What ranks are about to post, compared: through memory they share, and through the store.
#include "tessera/comm/detail/watch/comparer.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/region/collective_stamp.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <future>
#include <thread>

namespace tessera::comm::watch {
namespace {

using testing::message_of;
using Body = std::function<void(Comparer&, int rank)>;

region::Stamp stamp_of(uint64_t number, c10::ScalarType dtype = c10::ScalarType::Float) {
  return region::stamp_of(Kind::AllReduce, dtype, number);
}
Claim claim_of(int64_t bytes, int ranks) {
  Claim claim(ranks);
  claim.gives.assign(claim.gives.size(), bytes);
  claim.takes.assign(claim.takes.size(), bytes);
  return claim;
}
void compare(Comparer& comparer, uint64_t number, int64_t bytes, c10::ScalarType dtype = c10::ScalarType::Float,
             int ranks = 3) {
  comparer.post(stamp_of(number, dtype), claim_of(bytes, ranks), {})->wait(std::chrono::seconds(20));
}

// `body` on three ranks, over each way to compare.
void on_three(const Body& body, uint64_t most = 100) {
  for (const bool by_region : {true, false}) {
    SCOPED_TRACE(by_region ? "region" : "store");
    const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; rank++)
      threads.emplace_back([&, rank] {
        ConnectOptions options;
        options.store = store;
        options.rank = rank;
        options.size = 3;
        options.group = "dp";
        options.ranks = {0, 2, 4};
        options.timeout = std::chrono::seconds(20);
        const auto comparer = by_region ? compare_by_region(options) : compare_by_store(options, most);
        body(*comparer, rank);
        comparer->leave();
      });
    for (auto& thread : threads) thread.join();
  }
}

TEST(Comparer, AgreeingRanksPass) {
  on_three([](Comparer& comparer, int) {
    for (uint64_t i = 0; i < 20; i++) EXPECT_NO_THROW(compare(comparer, i, 16));
    std::promise<void> told;
    comparer.post(stamp_of(20), claim_of(16, 3), [&] { told.set_value(); });
    told.get_future().wait();  // though nobody waits for the check itself
  });
}

TEST(Comparer, SizesThatDiffer) {
  on_three([](Comparer& comparer, int rank) {
    const auto said = message_of<CommError>([&] { compare(comparer, 0, rank == 2 ? 20 : 16); });
    EXPECT_SAYS(said, "rank 0 expects 16 bytes from rank 4, which posted 20");
    EXPECT_SAYS(said, "allreduce_ #0 of Float on group 'dp' (ranks 0,2,4)");
    EXPECT_NO_THROW(compare(comparer, 1, 16)) << "all of them have left it out: the group goes on";
  });
}

TEST(Comparer, CollectivesThatDiffer) {
  on_three([](Comparer& comparer, int rank) {
    const auto said = message_of<CommError>(
        [&] { compare(comparer, 0, 16, rank == 1 ? c10::ScalarType::Int : c10::ScalarType::Float); });
    EXPECT_SAYS(said, "ranks disagree on group 'dp'");
    EXPECT_SAYS(said, "rank 2 posted allreduce_ #0 of Int");
    EXPECT_SAYS(said, "of Float");
  });
}

TEST(Comparer, ByTheStoreOnlyTheFirstOnes) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  ConnectOptions options;
  options.store = store;
  options.size = 2;
  options.ranks = {0, 1};
  options.timeout = std::chrono::milliseconds(50);
  const auto alone = compare_by_store(options, 1);  // its peer never comes
  EXPECT_ERROR(CommError, alone->post(stamp_of(0), claim_of(16, 2), {})->wait(std::chrono::milliseconds(20)),
               "waited 0.02 s for all ranks to post it");
  const auto later = alone->post(stamp_of(1), claim_of(16, 2), {});
  EXPECT_TRUE(later->done());
  EXPECT_EQ(later->error(), "");
}

}  // namespace
}  // namespace tessera::comm::watch
