#include "tessera/base/detail/parallel.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

namespace tessera {
namespace {

class ThreadsForTest {
 public:
  explicit ThreadsForTest(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~ThreadsForTest() { at::set_num_threads(before_); }

 private:
  int before_;
};

TEST(ParallelFor, RunsEveryIndexOnceOnAsManyThreadsAsLibTorch) {
  for (const int threads : {1, 2, 3}) {
    const ThreadsForTest scope(threads);
    std::vector<int> runs(100, 0);
    std::set<std::thread::id> ids;
    std::mutex mutex;
    const auto before = parts_run_by_other_threads();
    parallel_for(0, 100, 1, [&](int64_t begin, int64_t end) {
      for (auto i = begin; i < end; i++) runs[static_cast<size_t>(i)]++;
      const std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    });
    EXPECT_EQ(runs, std::vector<int>(100, 1));
    EXPECT_EQ(ids.size(), threads);
    EXPECT_EQ(parts_run_by_other_threads() - before, threads - 1);
  }
}

TEST(ParallelFor, SmallAndNestedLoopsAreOneCall) {
  const ThreadsForTest scope(2);
  int calls = 0;
  parallel_for(3, 3, 1, [&](int64_t, int64_t) { calls++; });
  EXPECT_EQ(calls, 0);
  parallel_for(0, 50, 50, [&](int64_t begin, int64_t end) { calls += begin == 0 && end == 50; });
  EXPECT_EQ(calls, 1);
  std::vector<int> inner(2, 0);
  parallel_for(0, 2, 1, [&](int64_t outer, int64_t) {
    parallel_for(0, 50, 1,
                 [&](int64_t begin, int64_t end) { inner[static_cast<size_t>(outer)] += begin == 0 && end == 50; });
  });
  EXPECT_EQ(inner, std::vector<int>(2, 1));
}

TEST(ParallelFor, AnExceptionOfAPartIsThrown) {
  const ThreadsForTest scope(2);
  for (const int64_t failing : {0, 99})
    EXPECT_THROW(parallel_for(0, 100, 1,
                              [&](int64_t begin, int64_t end) {
                                if (begin <= failing && failing < end) throw std::out_of_range("a part");
                              }),
                 std::out_of_range);
}

}  // namespace
}  // namespace tessera
