// Redistributions and collectives are visible to LibTorch's RecordFunction, and so to its profilers.
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/ranks.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;

// Begin and end of each function that runs on this thread: "+name" and "-name".
thread_local std::vector<std::string>* heard = nullptr;

struct Listener {
  std::vector<std::string> events;
  at::CallbackHandle handle;

  Listener() {
    heard = &events;
    handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
          heard->push_back(std::string("+") + f.name());
          return nullptr;
        },
        [](const at::RecordFunction& f, at::ObserverContext*) { heard->push_back(std::string("-") + f.name()); }));
  }
  ~Listener() {
    at::removeCallback(handle);
    heard = nullptr;
  }
  int64_t where(const std::string& event) const {  // -1: never
    const auto found = std::find(events.begin(), events.end(), event);
    return found == events.end() ? -1 : found - events.begin();
  }
};

TEST(Profile, RecordsARedistributionAndItsCollectiveInside) {
  for (int n : {2, 4})
    run_ranks(n, [&](Rank& me) {
      const auto x = distribute_tensor(at::ones({8, 4}), me.mesh({n}, {"tp"}), {Shard(0)});
      Listener listener;
      x.redistribute({Replicate()}).to_local();
      const auto begin = listener.where("+tessera::redistribute"), end = listener.where("-tessera::redistribute");
      const auto collective = listener.where("+all_gather_into_tensor");
      EXPECT_GE(begin, 0) << c10::Join("\n", listener.events);
      EXPECT_GT(collective, begin);
      EXPECT_LT(collective, end);
    });
}

TEST(Profile, RecordsNothingWithoutRedistribution) {
  run_ranks(2, [](Rank& me) {
    const auto x = distribute_tensor(at::ones({8, 4}), me.mesh("tp=2"), {Shard(0)});
    Listener listener;
    x.redistribute({Shard(0)}).to_local();
    EXPECT_EQ(listener.where("+tessera::redistribute"), -1) << c10::Join("\n", listener.events);
  });
}

}  // namespace
}  // namespace tessera
