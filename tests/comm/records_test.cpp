#include "tessera/comm/detail/records.h"

#include "tessera/comm/functional_collectives.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <sstream>

namespace tessera {
namespace {

using comm::Family;
using comm::Record;
using testing::Rank;
using testing::run_ranks;

struct Log : comm::Observer {
  std::vector<Record> posted, done;
  void on_post(const Record& r) override { posted.push_back(r); }
  void on_done(const Record& r) override { done.push_back(r); }
};

TEST(Records, OnePerCollectiveWithNumberBytesAndTimes) {
  for (int64_t n = 1; n <= 2; n++)
    run_ranks(n, [](Rank& me) {
      at::Tensor x = at::ones({4}), out = at::empty({4 * me.size()});
      me.group()->barrier().wait();  // not observed: no record, but it has a number
      Log log;
      comm::ObserverScope scope(&log);
      auto work = me.group()->all_gather_into_tensor(out, x, {.tensor_name = "w"});
      ASSERT_EQ(log.posted.size(), 1u);
      EXPECT_EQ(log.done.size(), me.size() == 1 ? 1u : 0u);
      work.wait();
      work.wait();
      ASSERT_EQ(log.done.size(), 1u);
      const Record& r = log.done[0];
      EXPECT_EQ(r.group, "world");
      EXPECT_EQ(r.sequence, 1u);
      EXPECT_STREQ(r.name(), "_allgather_base_");
      EXPECT_EQ(r.bytes, 16 * me.size());
      EXPECT_EQ(r.dtype, at::kFloat);
      EXPECT_EQ(r.tensor_name, "w");
      EXPECT_LE(r.posted, r.started);
      EXPECT_LE(r.started, r.done);
      std::ostringstream text;
      text << r;
      EXPECT_EQ(text.str(), c10::str("_allgather_base_ #1 on 'world', ", 16 * me.size(), " bytes of Float, w"));
    });
}

TEST(Records, NamesByFamily) {
  run_ranks(2, [](Rank& me) {
    Log log;
    comm::ObserverScope scope(&log);
    at::Tensor x = at::ones({4}), half = at::ones({2}), twice = at::ones({8});
    const auto& g = me.group();
    g->all_reduce(x, ReduceOp::Sum).wait();
    g->reduce_scatter_tensor(half, x, ReduceOp::Sum).wait();
    g->all_gather({at::ones({4}), at::ones({4})}, x).wait();
    g->broadcast(x, 0).wait();
    g->scatter(half, me.rank == 0 ? std::vector<at::Tensor>{half, half} : std::vector<at::Tensor>{}, 0).wait();
    g->barrier().wait();
    funcol::wait(funcol::all_gather(x, 0, {4, 4}, g), g);
    funcol::wait(funcol::reduce_scatter(x, 0, {1, 3}, ReduceOp::Sum, g), g);
    funcol::wait(funcol::all_reduce(x, ReduceOp::Sum, g), g);
    funcol::wait(funcol::all_to_all(x.view({2, 2}), 0, {1, 1}, 1, {2, 2}, g), g);
    funcol::wait(funcol::broadcast(x, 0, g), g);
    std::vector<std::string> counted, others;
    for (const auto& r : log.posted) (r.counted() ? counted : others).push_back(r.name());
    EXPECT_EQ(counted, (std::vector<std::string>{"allreduce_", "_reduce_scatter_base_", "allgather_", "broadcast_",
                                                 "scatter_", "all_gather_into_tensor", "reduce_scatter_tensor",
                                                 "all_reduce", "all_to_all_single", "broadcast"}));
    EXPECT_EQ(others, (std::vector<std::string>{"barrier", "wait_tensor", "wait_tensor", "wait_tensor", "wait_tensor",
                                                "wait_tensor"}));
  });
}

TEST(Records, ScopesNestAndArePerThread) {
  run_ranks(2, [](Rank& me) {
    Log outer, inner;
    comm::ObserverScope outer_scope(&outer);
    {
      comm::ObserverScope inner_scope(&inner);
      EXPECT_TRUE(comm::observed());
      me.group()->barrier().wait();
    }
    me.group()->barrier().wait();
    EXPECT_EQ(outer.posted.size(), 2u);  // those of this rank only
    EXPECT_EQ(inner.posted.size(), 1u);
  });
  EXPECT_FALSE(comm::observed());
}

}  // namespace
}  // namespace tessera
