// Comparison of the collectives that ranks are about to post: through shared memory and through the store.
#include "tessera/comm/detail/watch/comparer.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/region/collective_fingerprint.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <future>
#include <thread>

namespace tessera::comm::watch {
namespace {

using testing::error_message;
using Body = std::function<void(Comparer&, int rank)>;

region::CollectiveFingerprint fingerprint_of(uint64_t number, c10::ScalarType dtype = c10::ScalarType::Float) {
  return region::fingerprint_of(CommKind::AllReduce, dtype, number);
}
SendRecvBytes sizes_of(int64_t bytes, int ranks) {
  SendRecvBytes sizes(ranks);
  sizes.send.assign(sizes.send.size(), bytes);
  sizes.recv.assign(sizes.recv.size(), bytes);
  return sizes;
}
void compare(Comparer& comparer, uint64_t number, int64_t bytes, c10::ScalarType dtype = c10::ScalarType::Float,
             int ranks = 3) {
  comparer.post(fingerprint_of(number, dtype), sizes_of(bytes, ranks), {})->wait(std::chrono::seconds(20));
}

// Runs `body` on three ranks, with each kind of comparer.
void on_three(const Body& body, uint64_t max_compared = 100) {
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
        const auto comparer = by_region ? compare_by_region(options) : compare_by_store(options, max_compared);
        body(*comparer, rank);
        comparer->leave();
      });
    for (auto& thread : threads) thread.join();
  }
}

TEST(Comparer, EqualCollectivesPass) {
  on_three([](Comparer& comparer, int) {
    for (uint64_t i = 0; i < 20; i++) EXPECT_NO_THROW(compare(comparer, i, 16));
    std::promise<void> done;
    comparer.post(fingerprint_of(20), sizes_of(16, 3), [&] { done.set_value(); });
    done.get_future().wait();  // although no thread waits for the check itself
  });
}

TEST(Comparer, DifferentSizesFail) {
  on_three([](Comparer& comparer, int rank) {
    const auto message = error_message<CommError>([&] { compare(comparer, 0, rank == 2 ? 20 : 16); });
    EXPECT_CONTAINS(message, "rank 0 expects 16 bytes from rank 4, which posted 20");
    EXPECT_CONTAINS(message, "allreduce_ #0 of Float on group 'dp' (ranks 0,2,4)");
    EXPECT_NO_THROW(compare(comparer, 1, 16)) << "no rank has posted the failed one, so the group is still usable";
  });
}

TEST(Comparer, DifferentCollectivesFail) {
  on_three([](Comparer& comparer, int rank) {
    const auto message = error_message<CommError>(
        [&] { compare(comparer, 0, 16, rank == 1 ? c10::ScalarType::Int : c10::ScalarType::Float); });
    EXPECT_CONTAINS(message, "ranks disagree on group 'dp'");
    EXPECT_CONTAINS(message, "rank 2 posted allreduce_ #0 of Int");
    EXPECT_CONTAINS(message, "of Float");
  });
}

TEST(Comparer, StoreComparesOnlyTheFirstCollectives) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  ConnectOptions options;
  options.store = store;
  options.size = 2;
  options.ranks = {0, 1};
  options.timeout = std::chrono::milliseconds(50);
  const auto alone = compare_by_store(options, 1);  // its peer never connects
  EXPECT_ERROR(CommError, alone->post(fingerprint_of(0), sizes_of(16, 2), {})->wait(std::chrono::milliseconds(20)),
               "waited 0.02 s for all ranks to post it");
  const auto later = alone->post(fingerprint_of(1), sizes_of(16, 2), {});
  EXPECT_TRUE(later->done());
  EXPECT_EQ(later->error(), "");
}

}  // namespace
}  // namespace tessera::comm::watch
