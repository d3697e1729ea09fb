// Ranks that disagree, stall or end: every other rank gets an error that names the rank and the collective. No rank
// hangs.
#include "tessera/base/error.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <barrier>
#include <thread>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;

// The error of run_ranks, which must fail.
std::string failure_report(int64_t n, const testing::Body& body, testing::RankOptions options = {}) {
  try {
    run_ranks(n, body, options);
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "no rank failed";
  return "";
}
void expect_has(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

TEST(Failures, DifferentCollectives) {
  auto report = failure_report(2, [](Rank& me) {
    at::Tensor x = at::ones({4}), y = at::ones({8});
    if (me.rank == 0)
      me.group()->all_reduce(x, ReduceOp::Sum, {.tensor_name = "wq.grad"}).wait();
    else
      me.group()->all_gather_into_tensor(y, x).wait();
  });
  expect_has(report,
             {"2 of 2 ranks", "ranks disagree on group 'world'", "rank 0 posted allreduce_ #0 ('wq.grad') of Float",
              "rank 1 posted _allgather_base_ #0 of Float"});
}

TEST(Failures, DifferentSizes) {
  auto report = failure_report(3, [](Rank& me) {
    at::Tensor x = at::ones({me.rank == 2 ? 5 : 4});
    me.group()->all_reduce(x, ReduceOp::Sum).wait();
  });
  expect_has(report, {"ranks disagree", "rank 2 differs from most ranks: ", "bytes from rank", "which posted"});
}

TEST(Failures, DifferentDtypesOpsRootsAndNumbers) {
  expect_has(failure_report(2,
                            [](Rank& me) {
                              at::Tensor x = at::ones({4}, me.rank ? at::kFloat : at::kInt);
                              me.group()->all_reduce(x, ReduceOp::Sum).wait();
                            }),
             {"of Int", "of Float"});
  expect_has(failure_report(2,
                            [](Rank& me) {
                              at::Tensor x = at::ones({4});
                              me.group()->all_reduce(x, me.rank ? ReduceOp::Sum : ReduceOp::Max).wait();
                            }),
             {"another reduction"});
  expect_has(failure_report(2,
                            [](Rank& me) {
                              at::Tensor x = at::ones({4});
                              me.group()->broadcast(x, me.rank).wait();
                            }),
             {"with root 0", "with root 1"});
}

TEST(Failures, DifferentSplitsOfAnAllToAll) {
  auto report = failure_report(2, [](Rank& me) {
    at::Tensor x = at::ones({4}), y = at::ones({3});
    const std::vector<int64_t> two{2, 2}, takes{2, 1};
    if (me.rank == 0)
      me.group()->all_to_all_single(x, x, two, two).wait();
    else
      me.group()->all_to_all_single(y, x, {1, 2}, two).wait();
  });
  expect_has(report, {"alltoall_base_ #0", "rank 1 expects 4 bytes from rank 0, which posted 8"});
}

TEST(Failures, SendAndRecvWithDifferentTags) {
  auto report = failure_report(2, [](Rank& me) {
    at::Tensor x = at::ones({4});
    if (me.rank == 0)
      me.group()->send(x, 1, /*tag=*/3).wait();
    else
      me.group()->recv(x, 0, /*tag=*/4).wait();
  });
  expect_has(report, {"rank 1 receives 16 bytes of Float with tag 4",
                      "the next message of rank 0 is 16 bytes of Float with tag 3"});
}

TEST(Failures, TimeOutNamesTheMissingRank) {
  std::barrier all_done(3);
  run_ranks(3,
            [&](Rank& me) {
              auto pair = me.rank < 2 ? me.world.new_group({0, 1}, "dp") : comm::Group();
              at::Tensor x = at::ones({4});
              if (me.rank == 0)
                EXPECT_ERROR(CommError, pair->all_reduce(x, ReduceOp::Sum, {.tensor_name = "bias"}).wait(),
                             "rank 0 waited 0.15 s for rank 1 in allreduce_ #0 ('bias') of Float on group 'dp'");
              all_done.arrive_and_wait();  // no rank leaves before
            },
            {.timeout = std::chrono::milliseconds(150)});
}

TEST(Failures, ExceptionOnOneRankAbortsTheOthers) {
  const auto begin = std::chrono::steady_clock::now();
  auto report = failure_report(4, [](Rank& me) {
    auto mesh = me.mesh("dp=2,tp=2");
    if (me.rank == 2) throw std::runtime_error("no luck today");
    at::Tensor x = at::ones({4});
    mesh.get_group("tp")->all_reduce(x, ReduceOp::Sum).wait();
    mesh.get_group("dp")->all_reduce(x, ReduceOp::Sum).wait();
    me.group()->barrier().wait();
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30)) << "aborted, not timed out";
  expect_has(report, {"rank 2 (the first to fail): no luck today",
                      "rank 3: rank 3, allreduce_ #0 on group 'tp' (ranks 2,3): ", "rank 2 failed: no luck today"});
  EXPECT_LT(report.find("rank 0:"), report.find("rank 1:"));
  EXPECT_LT(report.find("rank 1:"), report.find("rank 2 (the"));
}

TEST(Failures, RankThatHasLeftIsNamed) {
  auto report = failure_report(3, [](Rank& me) {
    at::Tensor x = at::ones({4});
    for (int i = 0; i < (me.rank == 1 ? 2 : 3); i++)
      me.group()->all_reduce(x, ReduceOp::Sum, {.tensor_name = "bias"}).wait();
  });
  expect_has(report, {"2 of 3 ranks", "rank 1 has left group 'world' after 2 collectives",
                      "rank 0, allreduce_ #2 ('bias') of Float on group 'world' (ranks 0,1,2): ",
                      "rank 2, allreduce_ #2 ('bias') of Float on group 'world' (ranks 0,1,2): "});
}

TEST(Failures, MessagesOfARankThatHasLeftAreReceived) {
  run_ranks(2, [](Rank& me) {
    at::Tensor x = at::full({4}, 7.0), y = at::zeros({4});
    if (me.rank == 1) {
      me.group()->send(x, 0).wait();
      return;
    }
    auto first = me.group()->recv(y, 1), second = me.group()->recv(x, 1);
    EXPECT_ERROR(CommError, second.wait(), "rank 1 has left group 'world' after 0 collectives", "recv_ #1");
    first.wait();
    EXPECT_TRUE(y.equal(at::full({4}, 7.0)));
  });
}

TEST(Failures, PollingSeesThatARankHasLeft) {
  run_ranks(2, [](Rank& me) {
    if (me.rank == 1) return;
    at::Tensor x = at::ones({4});
    auto work = me.group()->all_reduce(x, ReduceOp::Sum);
    while (!work.done()) std::this_thread::yield();
    EXPECT_ERROR(CommError, work.wait(), "rank 1 has left");
  });
}

TEST(Failures, AbortReachesLaterCollectives) {
  run_ranks(2, [](Rank& me) {
    auto pair = me.world.new_group({0, 1});
    if (me.rank == 0) pair->abort("the reason");
    me.group()->barrier().wait();
    at::Tensor x = at::ones({4});
    try {
      pair->all_reduce(x, ReduceOp::Sum);
      ADD_FAILURE() << "posted on an aborted group";
    } catch (const CommError& error) {
      EXPECT_NE(std::string(error.what()).find("the reason"), std::string::npos);
    }
    me.group()->barrier().wait();  // other groups are not affected
  });
}

// Everything in which a rank waits for another one that fails before it takes part. The error gives the reason, not
// that a time-out has passed.
TEST(Failures, AFailedThreadRankWakesTheOthers) {
  struct Wait {
    const char* what;
    void (*run)(Rank& me);
  };
  const Wait kWaits[] = {
      {"a collective", [](Rank& me) { me.group()->barrier().wait(); }},
      {"a collective of a group that the failed rank has not created",
       [](Rank& me) {
         me.world.new_group({me.rank, 2})->barrier().wait();
       }},
      {"an exchange of texts", [](Rank& me) { comm::require_same_on_all_ranks(me.group(), "test", {"equal"}); }},
      {"a decision",
       [](Rank& me) {
         comm::gather_decide_broadcast(
             me.group(), "test", [] { return ""; }, [](const auto&) { return ""; });
       }},
      {"a broadcast text in a group that the failed rank has not created",
       [](Rank& me) {
         comm::broadcast_text(me.world.new_group({2, me.rank}), "test", "text");
       }},
  };
  for (const auto& wait : kWaits) {
    SCOPED_TRACE(wait.what);
    const auto body = [&](Rank& me) {
      if (me.rank == 2) throw std::runtime_error("it broke");
      wait.run(me);
    };
    const auto report = failure_report(3, body, {.timeout = std::chrono::seconds(20)});
    expect_has(report, {"3 of 3 ranks", "rank 2 (the first to fail): it broke"});
    EXPECT_EQ(report.find("waited"), std::string::npos) << report;
  }
}

TEST(Failures, AStoreServesALaterWorldAfterAFailure) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto run = [&](int64_t rank, bool fails) {
    InitOptions options;
    options.backend = "threads";
    options.rank = rank;
    options.world_size = 2;
    options.store = store;
    const auto world = init(options);
    if (fails)
      world.abort("I give up");
    else
      world.new_group({0, 1})->barrier().wait();
    destroy();
  };
  for (const bool fails : {true, false}) {
    std::thread other(run, 1, fails);
    run(0, fails);
    other.join();
  }
}

TEST(Failures, BadArgumentsLeaveTheGroupUsable) {
  run_ranks(2, [](Rank& me) {
    at::Tensor out = at::ones({3}), in = at::ones({4}), complex = at::ones({1}, at::kComplexFloat);
    EXPECT_THROW(me.group()->all_gather_into_tensor(out, in), UsageError);
    EXPECT_THROW(me.group()->reduce_scatter_tensor(out, in, ReduceOp::Sum), UsageError);
    EXPECT_THROW(me.group()->all_gather({out}, in), UsageError);
    EXPECT_THROW(me.group()->all_to_all_single(out, in, {}, {}), UsageError);
    EXPECT_THROW(me.group()->all_reduce_coalesced({out, complex}, ReduceOp::Sum), UsageError);
    EXPECT_THROW(me.group()->all_reduce(complex, ReduceOp::Max), UsageError);
    EXPECT_THROW(me.group()->send(in, me.rank), UsageError);
    at::Tensor x = at::ones({4});
    me.group()->all_reduce(x, ReduceOp::Sum).wait();
    EXPECT_TRUE(x.equal(at::full({4}, 2.0)));
  });
}

}  // namespace
}  // namespace tessera
