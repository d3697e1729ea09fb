#pragma once
#include "tessera/comm/collectives.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::testing {

// Runs every collective of Communicator once, on 2 or 4 ranks over any backend, and checks the results.
inline void every_collective(Rank& me) {
  const int64_t n = me.size(), r = me.rank;
  const auto& g = me.group();
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

  std::vector<at::Tensor> outs, want;  // uneven, one empty
  for (int64_t p = 0; p < n; p++) {
    outs.push_back(at::empty({p, 2}));
    want.push_back(at::full({p, 2}, static_cast<double>(p)));
  }
  g->all_gather(outs, want[static_cast<size_t>(r)]).wait();
  EXPECT_EQ(close(outs, want), "");
  at::Tensor mine = at::empty({r, 2});
  g->scatter(mine, r == 1 ? want : std::vector<at::Tensor>{}, 1).wait();
  EXPECT_TRUE(mine.equal(want[static_cast<size_t>(r)]));
  for (auto& out : outs) out.zero_();
  g->gather(r == 0 ? outs : std::vector<at::Tensor>{}, mine, 0).wait();
  if (r == 0) {
    EXPECT_EQ(close(outs, want), "");
  }
  at::Tensor total = at::ones({2});
  g->reduce(total, 1, ReduceOp::Sum).wait();
  EXPECT_EQ(total[0].item<float>(), r == 1 ? static_cast<float>(n) : 1.f);

  std::vector<int64_t> sizes;
  for (int64_t p = 0; p < n; p++) sizes.push_back(p);
  at::Tensor full = at::arange(n * (n - 1) / 2 * 3).view({3, -1}).to(at::kFloat);
  at::Tensor part = full.narrow(1, r * (r - 1) / 2, r);
  at::Tensor gathered = funcol::all_gather(part, 1, sizes, g),
             scattered = funcol::reduce_scatter(full, 1, sizes, ReduceOp::Avg, g);
  funcol::wait(gathered, g);
  funcol::wait(scattered, g);
  EXPECT_TRUE(gathered.equal(full));
  EXPECT_EQ(close(scattered, part), "");
  std::vector<int64_t> rows(static_cast<size_t>(n), 0);
  rows[0] = 3;
  at::Tensor moved = funcol::all_to_all(part, 0, rows, 1, sizes, g);  // all of it to rank 0
  funcol::wait(moved, g);
  EXPECT_TRUE(moved.equal(r == 0 ? full : full.narrow(0, 0, 0)));
  auto both = funcol::all_gather_coalesced(
      {part, at::full({1}, r, at::kLong)}, {1, 0},
      [&] {
        auto all = sizes;
        all.insert(all.end(), static_cast<size_t>(n), 1);
        return all;
      }(),
      g);
  for (auto& x : both) funcol::wait(x, g);
  EXPECT_TRUE(both[0].equal(full) && both[1].equal(at::arange(n)));
  std::vector<at::Tensor> lists{at::ones({2}), at::full({1}, 2.0)};
  g->all_reduce_coalesced(lists, ReduceOp::Sum).wait();
  EXPECT_EQ(lists[1].item<float>(), 2.f * static_cast<float>(n));

  at::Tensor sent = at::full({3}, static_cast<double>(r)), got = at::empty({3});
  auto sending = isend(sent, (r + 1) % n);
  recv(got, (r + n - 1) % n);
  sending.wait();
  EXPECT_TRUE(got.equal(at::full({3}, static_cast<double>((r + n - 1) % n))));

  std::vector<comm::Work> works;
  std::vector<at::Tensor> xs;
  for (int i = 0; i < 10; i++) {
    xs.push_back(at::full({100}, static_cast<double>(i)));
    works.push_back(g->all_reduce(xs.back(), ReduceOp::Sum));
  }
  for (auto& work : works) work.wait();
  EXPECT_TRUE(xs[9].equal(at::full({100}, 9.0 * static_cast<double>(n))));
  barrier();
}

}  // namespace tessera::testing
