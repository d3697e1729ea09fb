// The collectives over gloo, in processes; and the process harness itself.
#include "tessera/base/error.h"
#include "tessera/base/settings.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/ops.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/file_check.h"
#include "tessera/testing/spawn.h"

#include <ATen/ATen.h>

#include <csignal>

namespace tessera {
namespace {

using testing::close;
using testing::FileCheck;
using testing::Rank;
using testing::spawn_ranks;
using Tensors = std::vector<at::Tensor>;

void every_collective(Rank& me) {
  const int64_t n = me.size(), r = me.rank;
  const auto& g = me.group();
  EXPECT_EQ(me.world.backend(), "gloo");
  for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kByte})
    for (auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product}) {
      if (op == ReduceOp::Avg && at::isIntegralType(dtype, true)) continue;
      at::Tensor x = at::full({5}, r + 1, dtype);
      g->all_reduce(x, op).wait();
      const double want[] = {n * (n + 1) / 2.0, (n + 1) / 2.0, n == 2 ? 2.0 : 24.0, static_cast<double>(n), 1.0};
      EXPECT_EQ(x[0].item<double>(), want[static_cast<int>(op)]) << dtype << " " << op;
    }
  at::Tensor view = at::full({2, 3}, static_cast<double>(r)).t();
  g->broadcast(view, n - 1).wait();
  EXPECT_TRUE(view.equal(at::full({3, 2}, static_cast<double>(n - 1))));

  Tensors outs, want;  // uneven, one empty
  for (int64_t p = 0; p < n; p++) {
    outs.push_back(at::empty({p, 2}));
    want.push_back(at::full({p, 2}, static_cast<double>(p)));
  }
  g->all_gather(outs, want[static_cast<size_t>(r)]).wait();
  EXPECT_EQ(close(outs, want), "");
  at::Tensor mine = at::empty({r, 2});
  g->scatter(mine, r == 1 ? want : Tensors{}, 1).wait();
  EXPECT_TRUE(mine.equal(want[static_cast<size_t>(r)]));
  for (auto& out : outs) out.zero_();
  g->gather(r == 0 ? outs : Tensors{}, mine, 0).wait();
  if (r == 0) {
    EXPECT_EQ(close(outs, want), "");
  }
  at::Tensor total = at::ones({2});
  g->reduce(total, 1, ReduceOp::Sum).wait();
  EXPECT_EQ(total[0].item<float>(), r == 1 ? static_cast<float>(n) : 1.f);

  std::vector<int64_t> sizes;
  for (int64_t p = 0; p < n; p++) sizes.push_back(p);
  at::Tensor whole = at::arange(n * (n - 1) / 2 * 3).view({3, -1}).to(at::kFloat);
  at::Tensor part = whole.narrow(1, r * (r - 1) / 2, r);
  at::Tensor gathered = comm::all_gather(part, 1, sizes, g),
             scattered = comm::reduce_scatter(whole, 1, sizes, ReduceOp::Avg, g);
  comm::wait(gathered, g);
  comm::wait(scattered, g);
  EXPECT_TRUE(gathered.equal(whole));
  EXPECT_EQ(close(scattered, part), "");
  std::vector<int64_t> rows(static_cast<size_t>(n), 0);
  rows[0] = 3;
  at::Tensor moved = comm::all_to_all(part, 0, rows, 1, sizes, g);  // all of it to rank 0
  comm::wait(moved, g);
  EXPECT_TRUE(moved.equal(r == 0 ? whole : whole.narrow(0, 0, 0)));
  auto both = comm::all_gather_coalesced(
      {part, at::full({1}, r, at::kLong)}, {1, 0},
      [&] {
        auto all = sizes;
        all.insert(all.end(), static_cast<size_t>(n), 1);
        return all;
      }(),
      g);
  for (auto& x : both) comm::wait(x, g);
  EXPECT_TRUE(both[0].equal(whole) && both[1].equal(at::arange(n)));
  Tensors lists{at::ones({2}), at::full({1}, 2.0)};
  g->all_reduce_coalesced(lists, ReduceOp::Sum).wait();
  EXPECT_EQ(lists[1].item<float>(), 2.f * static_cast<float>(n));

  at::Tensor sent = at::full({3}, static_cast<double>(r)), got = at::empty({3});
  auto sending = isend(sent, (r + 1) % n);
  recv(got, (r + n - 1) % n);
  sending.wait();
  EXPECT_TRUE(got.equal(at::full({3}, static_cast<double>((r + n - 1) % n))));

  std::vector<comm::Work> works;
  Tensors xs;
  for (int i = 0; i < 10; i++) {
    xs.push_back(at::full({100}, static_cast<double>(i)));
    works.push_back(g->all_reduce(xs.back(), ReduceOp::Sum));
  }
  for (auto& work : works) work.wait();
  EXPECT_TRUE(xs[9].equal(at::full({100}, 9.0 * static_cast<double>(n))));
  barrier();
}

TEST(Gloo, EveryCollectiveOnTwo) { spawn_ranks(2, every_collective); }
TEST(Gloo, EveryCollectiveOnFour) { spawn_ranks(4, every_collective); }

TEST(Gloo, MeshAndSeed) {
  spawn_ranks(4, [](Rank& me) {
    at::Tensor random = at::rand({4}), from_zero = random.clone();
    broadcast(from_zero, 0);
    EXPECT_TRUE(random.equal(from_zero)) << "every rank starts with seed 1234";
    auto mesh = me.mesh("dp=2,tp=2");
    at::Tensor x = at::full({1}, static_cast<double>(me.rank));
    all_reduce(x, ReduceOp::Sum, {mesh, "dp"});
    EXPECT_EQ(x.item<float>(), static_cast<float>(me.rank % 2 * 2 + 2));
  });
}

std::string report_of(int64_t n, const testing::Body& body, testing::SpawnOptions options = {}) {
  try {
    spawn_ranks(n, body, options);
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "no rank failed";
  return "";
}

TEST(Spawn, Exceptions) {
  const auto report = report_of(2, [](Rank& me) {
    if (me.rank == 1) throw std::runtime_error("bad luck");
  });
  FileCheck().check("rank 1 exited with 10").check("rank 1 threw: bad luck").run(report);
}
TEST(Spawn, FailedExpectations) {
  const auto report = report_of(2, [](Rank& me) { EXPECT_EQ(me.rank, 1) << "on purpose"; });
  FileCheck().check("rank 0 exited with 10").check("on purpose").run(report);
}
TEST(Spawn, Signals) {
  FileCheck().check("rank 0 was ended by signal 9").run(report_of(1, [](Rank&) { raise(SIGKILL); }));
}
TEST(Spawn, AChildThatNeverComesToTheCall) {
  if (setting_is_set("TESSERA_SPAWN")) return;
  FileCheck().check("rank 0 never came to this call").run(report_of(1, [](Rank&) {}));
}
TEST(Spawn, SecondCallOfATest) {
  spawn_ranks(1, [](Rank&) {});
  spawn_ranks(2, [](Rank& me) { EXPECT_EQ(me.size(), 2); });
}

TEST(Spawn, ARankThatHangsIsStopped) {
  const auto report = report_of(1, [](Rank&) { pause(); }, {.timeout = std::chrono::seconds(2)});
  EXPECT_EQ(report.substr(0, report.find(':', report.find(':') + 1)),
            "of 1 process ranks some failed:\nrank 0 was still running after 2 s");
}

TEST(Gloo, TimeOutNamesGroupAndCollective) {
  FileCheck()
      .check("rank 0 threw: rank 0, allreduce_ #0 ('bias') on group 'slow' (ranks 0,1)")
      .run(report_of(2,
                     [](Rank& me) {
                       auto group = me.world.new_group({0, 1}, "slow");
                       at::Tensor x = at::ones({2});
                       if (me.rank == 0) group->all_reduce(x, ReduceOp::Sum, {.tensor_name = "bias"}).wait();
                     },
                     {.timeout = std::chrono::seconds(4)}));
}

}  // namespace
}  // namespace tessera
