// Every collective on thread ranks, in worlds of 1 to 4 ranks, compared with values computed without communication.
#include "tessera/comm/communicator.h"

#include "tessera/base/error.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;
using Tensors = std::vector<at::Tensor>;

void on_all_sizes(const testing::Body& body) {
  for (int64_t n = 1; n <= 4; n++) {
    SCOPED_TRACE(n);
    run_ranks(n, body);
    run_ranks(n, body, {.backend = "shm"});  // the same threads over shared memory
  }
}

const std::vector<at::ScalarType> kDtypes = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong,
                                             at::kInt,   at::kShort,  at::kChar, at::kByte,     at::kComplexFloat};

// Different on each rank, small enough to be exact in every dtype.
at::Tensor value(int64_t rank, at::ScalarType dtype, at::IntArrayRef shape = {3, 2}) {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return (at::arange(n).remainder(5) + rank + 1).view(shape).to(dtype);
}
at::Tensor reduced(int64_t n, ReduceOp op, at::ScalarType dtype, at::IntArrayRef shape = {3, 2}) {
  at::Tensor result = value(0, dtype, shape);
  for (int64_t r = 1; r < n; r++) {
    at::Tensor x = value(r, dtype, shape);
    result = op == ReduceOp::Product ? result * x
             : op == ReduceOp::Max   ? at::maximum(result, x)
             : op == ReduceOp::Min   ? at::minimum(result, x)
                                     : result + x;
  }
  return op == ReduceOp::Avg ? result / n : result;
}

TEST(Communicator, AllReduceEveryDtypeAndOp) {
  on_all_sizes([](Rank& me) {
    for (auto dtype : kDtypes)
      for (auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Max, ReduceOp::Min}) {
        if (at::isComplexType(dtype) && (op == ReduceOp::Max || op == ReduceOp::Min)) continue;
        if (op == ReduceOp::Avg && at::isIntegralType(dtype, true)) continue;
        at::Tensor x = value(me.rank, dtype);
        me.group()->all_reduce(x, op).wait();
        const testing::Tolerance loose{1e-2, 1e-2};  // division in 16 bits
        EXPECT_EQ(testing::close(x, reduced(me.size(), op, dtype), op == ReduceOp::Avg ? loose : testing::Tolerance{}),
                  "")
            << dtype << " " << op;
      }
    at::Tensor truth = at::tensor({me.rank == 0 ? 1 : 0, 0, 1}).to(at::kBool);
    me.group()->all_reduce(truth, ReduceOp::Sum).wait();
    EXPECT_TRUE(truth.equal(at::tensor({1, 0, 1}).to(at::kBool)));
  });
}

// The dtypes for which LibTorch has no CPU addition.
TEST(Communicator, AllReduceRareDtypes) {
  on_all_sizes([](Rank& me) {
    const double sum = static_cast<double>(me.size() * (me.size() + 1) / 2);
    for (auto dtype : {at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e4m3fnuz,
                       at::kFloat8_e5m2, at::kFloat8_e5m2fnuz, at::kComplexHalf})
      for (int64_t numel : {3, 40'000}) {
        at::Tensor x = at::full({numel}, static_cast<double>(me.rank + 1)).to(dtype);
        me.group()->all_reduce(x, ReduceOp::Sum).wait();
        EXPECT_TRUE(x.to(at::kComplexFloat).equal(at::full({numel}, sum).to(at::kComplexFloat))) << dtype;
      }
  });
}

TEST(Communicator, HalfSumsAreAccumulatedInFloat) {
  run_ranks(3, [](Rank& me) {  // 2048 + 1 + 1 is 2048 in float16 arithmetic, 2050 in float32
    at::Tensor x = at::full({4}, me.rank == 0 ? 2048 : 1, at::kHalf);
    me.group()->all_reduce(x, ReduceOp::Sum).wait();
    EXPECT_EQ(x[0].item<float>(), 2050.f);
  });
}

TEST(Communicator, AllReduceOfAViewWritesTheView) {
  on_all_sizes([](Rank& me) {
    at::Tensor full = at::zeros({2, 3});
    at::Tensor column = full.select(1, 1);
    column.fill_(static_cast<double>(me.rank + 1));
    me.group()->all_reduce(column, ReduceOp::Sum).wait();
    EXPECT_EQ(full[0][1].item<float>(), static_cast<float>(me.size() * (me.size() + 1) / 2));
    EXPECT_EQ(full[0][0].item<float>(), 0.f);
  });
}

TEST(Communicator, AllReduceCoalescedIsOneCollective) {
  on_all_sizes([](Rank& me) {
    Tensors xs{value(me.rank, at::kFloat), value(me.rank, at::kFloat, {5}).t(), at::full({}, 1.0)};
    const uint64_t before = me.group()->sequence();
    me.group()->all_reduce_coalesced(xs, ReduceOp::Sum).wait();
    EXPECT_EQ(me.group()->sequence(), before + 1);
    EXPECT_EQ(testing::close(xs, {reduced(me.size(), ReduceOp::Sum, at::kFloat),
                                  reduced(me.size(), ReduceOp::Sum, at::kFloat, {5}),
                                  at::full({}, static_cast<double>(me.size()))}),
              "");
  });
}

TEST(Communicator, AllGather) {
  on_all_sizes([](Rank& me) {
    for (auto dtype : kDtypes) {
      Tensors all;
      for (int64_t r = 0; r < me.size(); r++) all.push_back(value(r, dtype));
      at::Tensor out = at::empty({3 * me.size(), 2}, dtype);
      me.group()->all_gather_into_tensor(out, value(me.rank, dtype)).wait();
      EXPECT_TRUE(out.equal(at::cat(all))) << dtype;
    }
    Tensors outs, want;  // of sizes 0, 1, 2, ..
    for (int64_t r = 0; r < me.size(); r++) {
      outs.push_back(at::empty({r, 2}));
      want.push_back(at::full({r, 2}, static_cast<double>(r)));
    }
    me.group()->all_gather(outs, at::full({me.rank, 2}, static_cast<double>(me.rank))).wait();
    EXPECT_EQ(testing::close(outs, want), "");
  });
}

TEST(Communicator, AllGatherCoalescedOfMixedDtypes) {
  on_all_sizes([](Rank& me) {
    const int64_t n = me.size();
    Tensors ins{at::full({2}, me.rank, at::kLong), at::full({3, 1}, static_cast<double>(me.rank))};
    Tensors outs{at::empty({2 * n}, at::kLong), at::empty({3 * n, 1})};
    me.group()->all_gather_coalesced(outs, ins).wait();
    EXPECT_TRUE(outs[0].equal(at::arange(n).repeat_interleave(2)));
    EXPECT_TRUE(outs[1].equal(at::arange(n).repeat_interleave(3).view({-1, 1}).to(at::kFloat)));
  });
}

TEST(Communicator, ReduceScatter) {
  on_all_sizes([](Rank& me) {
    const int64_t n = me.size();
    for (auto op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max}) {
      at::Tensor in = value(me.rank, at::kFloat, {2 * n, 3}), out = at::empty({2, 3});
      me.group()->reduce_scatter_tensor(out, in, op).wait();
      EXPECT_EQ(testing::close(out, reduced(n, op, at::kFloat, {2 * n, 3}).narrow(0, 2 * me.rank, 2)), "") << op;
      EXPECT_TRUE(in.equal(value(me.rank, at::kFloat, {2 * n, 3}))) << "the input is not changed";
    }
    Tensors ins;
    for (int64_t r = 0; r < n; r++) ins.push_back(at::full({r + 1}, static_cast<double>(r * 10 + me.rank)));
    at::Tensor out = at::empty({me.rank + 1});
    me.group()->reduce_scatter(out, ins, ReduceOp::Sum).wait();
    EXPECT_TRUE(out.equal(at::full({me.rank + 1}, static_cast<double>(me.rank * 10 * n + n * (n - 1) / 2))));
    Tensors pair_in{at::ones({n}), at::full({2 * n}, 2.0)}, pair_out{at::empty({1}), at::empty({2})};
    me.group()->reduce_scatter_coalesced(pair_out, pair_in, ReduceOp::Sum).wait();
    EXPECT_EQ(testing::close(pair_out, {at::full({1}, 1.0 * n), at::full({2}, 2.0 * n)}), "");
  });
}

TEST(Communicator, ReduceScatterThenAllGatherIsAllReduceToTheBit) {
  run_ranks(3, [](Rank& me) {
    for (auto op : {ReduceOp::Sum, ReduceOp::Avg}) {
      at::Tensor x = (at::arange(300).to(at::kFloat) + 0.1f * static_cast<float>(me.rank + 1)).sin();
      at::Tensor part = at::empty({100}), gathered = at::empty({300});
      me.group()->reduce_scatter_tensor(part, x, op).wait();
      me.group()->all_gather_into_tensor(gathered, part).wait();
      me.group()->all_reduce(x, op).wait();
      EXPECT_TRUE(gathered.equal(x)) << op;
    }
  });
}

TEST(Communicator, BroadcastScatterGatherReduce) {
  on_all_sizes([](Rank& me) {
    const int64_t n = me.size();
    for (int64_t root = 0; root < n; root++) {
      at::Tensor x = value(me.rank, at::kFloat);
      me.group()->broadcast(x, root).wait();
      EXPECT_TRUE(x.equal(value(root, at::kFloat)));

      Tensors parts;
      if (me.rank == root)
        for (int64_t r = 0; r < n; r++) parts.push_back(at::full({r, 2}, static_cast<double>(r)));  // uneven, one empty
      at::Tensor mine = at::empty({me.rank, 2});
      me.group()->scatter(mine, parts, root).wait();
      EXPECT_TRUE(mine.equal(at::full({me.rank, 2}, static_cast<double>(me.rank))));

      Tensors got;
      if (me.rank == root)
        for (int64_t r = 0; r < n; r++) got.push_back(at::empty({r, 2}));
      me.group()->gather(got, mine, root).wait();
      for (size_t r = 0; r < got.size(); r++)
        EXPECT_TRUE(got[r].equal(at::full({static_cast<int64_t>(r), 2}, static_cast<double>(r))));

      at::Tensor y = value(me.rank, at::kFloat);
      me.group()->reduce(y, root, ReduceOp::Sum).wait();
      EXPECT_TRUE(y.equal(me.rank == root ? reduced(n, ReduceOp::Sum, at::kFloat) : value(me.rank, at::kFloat)));
    }
    me.group()->barrier().wait();
  });
}

TEST(Communicator, AllToAll) {
  on_all_sizes([](Rank& me) {
    const int64_t n = me.size();
    at::Tensor in = at::arange(n) + 100 * me.rank, out = at::empty({n}, at::kLong);
    me.group()->all_to_all_single(out, in, {}, {}).wait();
    EXPECT_TRUE(out.equal(100 * at::arange(n) + me.rank));

    std::vector<int64_t> send, recv;  // rank r sends p + r rows to rank p
    for (int64_t p = 0; p < n; p++) {
      send.push_back(p + me.rank);
      recv.push_back(me.rank + p);
    }
    Tensors ins, want;
    for (int64_t p = 0; p < n; p++) {
      ins.push_back(at::full({p + me.rank, 2}, static_cast<double>(10 * me.rank + p)));
      want.push_back(at::full({me.rank + p, 2}, static_cast<double>(10 * p + me.rank)));
    }
    at::Tensor flat = at::empty_like(at::cat(want));
    me.group()->all_to_all_single(flat, at::cat(ins), recv, send).wait();
    EXPECT_TRUE(flat.equal(at::cat(want)));
    Tensors outs;
    for (const auto& w : want) outs.push_back(at::empty_like(w));
    me.group()->all_to_all(outs, ins).wait();
    EXPECT_EQ(testing::close(outs, want), "");
  });
}

TEST(Communicator, SendRecvInOrder) {
  run_ranks(3, [](Rank& me) {
    const int64_t next = (me.rank + 1) % 3, before = (me.rank + 2) % 3;
    std::vector<comm::Work> works;
    Tensors got{at::empty({4}), at::empty({50000}), at::empty({1})};
    for (int64_t i = 0; i < 3; i++) {  // the second is larger than a channel
      works.push_back(me.group()->send(at::full(got[static_cast<size_t>(i)].sizes(), 10.0 * i + me.rank), next, i));
      works.push_back(me.group()->recv(got[static_cast<size_t>(i)], before, i));
    }
    for (size_t i = works.size(); i-- > 0;) works[i].wait();  // in any order
    for (int64_t i = 0; i < 3; i++)
      EXPECT_TRUE(got[static_cast<size_t>(i)].equal(at::full(got[static_cast<size_t>(i)].sizes(), 10.0 * i + before)));
  });
}

// A rank that sends and then computes for long must not delay the receiver. Here it computes until the receiver has
// everything: small messages that wait in the channel together, one that is larger than the channel, one without bytes.
TEST(Communicator, MessagesArriveWithoutFurtherCallsOfTheSender) {
  for (const char* backend : {"threads", "shm", "gloo"}) {
    std::promise<void> received;
    run_ranks(2,
              [&](Rank& me) {
                std::vector<at::Tensor> values;
                for (const int64_t size : {5, 1, 0, 3000, 1'000'000, 7, 100'000, 2})
                  values.push_back(at::arange(size, at::kFloat).remainder(1000) + static_cast<int64_t>(values.size()));
                if (me.rank == 0) {
                  std::vector<comm::Work> works;
                  for (const at::Tensor& x : values) works.push_back(me.group()->send(x, 1));
                  received.get_future().wait();
                  for (comm::Work& work : works) work.wait();
                  return;
                }
                try {
                  for (const at::Tensor& x : values) {
                    at::Tensor y = at::empty_like(x);
                    me.group()->recv(y, 0).wait();
                    EXPECT_TRUE(y.equal(x)) << x.numel() << " over " << backend;
                  }
                } catch (const std::exception& error) {
                  ADD_FAILURE() << backend << ": " << error.what();
                }
                received.set_value();
              },
              {.backend = backend, .timeout = std::chrono::seconds(20)});
  }
}

// A message that nobody receives, and does not fit, fails nothing: neither other messages nor the end of the ranks.
TEST(Communicator, MessageThatNobodyReceives) {
  run_ranks(3, [](Rank& me) {
    const at::Tensor large = at::ones({1'000'000});
    comm::Work lost;
    if (me.rank == 0) lost = me.group()->send(large, 1);
    at::Tensor x = at::full({2}, 3.0), y = at::zeros({2});
    if (me.rank == 0) me.group()->send(x, 2).wait();
    if (me.rank == 2) me.group()->recv(y, 0).wait();
    me.group()->all_reduce(x, ReduceOp::Sum).wait();
    EXPECT_TRUE(x.equal(at::full({2}, 9.0)));
  });
}

TEST(Communicator, MessagesOfTwoRanksDoNotCountAsCollectives) {
  run_ranks(3, [](Rank& me) {
    at::Tensor x = at::full({2}, 5.0);
    if (me.rank == 0) me.group()->send(x, 1, 0).wait();
    if (me.rank == 1) me.group()->recv(x, 0, 0).wait();
    me.group()->all_reduce(x, ReduceOp::Sum).wait();  // was: ranks disagree, #1 and #0
    EXPECT_TRUE(x.equal(at::full({2}, 15.0)));
  });
}

TEST(Communicator, LargeTensorsAreSentInChunks) {
  run_ranks(3, [](Rank& me) {
    const int64_t n = 700'001;  // several chunks, and not a multiple of one
    at::Tensor x = at::arange(n).to(at::kFloat).remainder(1000) + me.rank;
    at::Tensor sum = at::arange(n).to(at::kFloat).remainder(1000) * 3 + 3;
    me.group()->all_reduce(x, ReduceOp::Sum).wait();
    EXPECT_TRUE(x.equal(sum));
    at::Tensor all = at::empty({3 * n});
    me.group()->all_gather_into_tensor(all, x + me.rank).wait();
    for (int64_t r = 0; r < 3; r++) EXPECT_TRUE(all.narrow(0, r * n, n).equal(sum + r));
    at::Tensor part = at::empty({n});
    me.group()->reduce_scatter_tensor(part, all, ReduceOp::Sum).wait();
    EXPECT_TRUE(part.equal((sum + me.rank) * 3));
    // one rank sends much to one other, nothing to the rest
    std::vector<int64_t> send(3, 0), recv(3, 0);
    if (me.rank == 0) send[2] = n;
    if (me.rank == 2) recv[0] = n;
    at::Tensor got = at::empty({me.rank == 2 ? n : 0});
    me.group()->all_to_all_single(got, me.rank == 0 ? x : at::empty({0}), recv, send).wait();
    EXPECT_TRUE(got.equal(me.rank == 2 ? sum : at::empty({0})));
  });
}

TEST(Communicator, ManyInFlightWaitedInReverse) {
  run_ranks(4, [](Rank& me) {
    Tensors xs;
    std::vector<comm::Work> works;
    for (int64_t i = 0; i < 30; i++) {  // more than the ring has slots
      xs.push_back(at::full({100}, static_cast<double>(i + me.rank)));
      works.push_back(me.group()->all_reduce(xs.back(), ReduceOp::Sum));
    }
    for (size_t i = works.size(); i-- > 0;) works[i].wait();
    for (int64_t i = 0; i < 30; i++)
      EXPECT_TRUE(xs[static_cast<size_t>(i)].equal(at::full({100}, static_cast<double>(4 * i + 6))));
  });
}

// Rank 0 waits for the small one first, rank 1 for the large one. Each still advances what the other waits for.
TEST(Communicator, WaitsInDifferentOrderOnTwoGroupsDoNotDeadlock) {
  run_ranks(2, [](Rank& me) {
    auto other = me.world.new_group({0, 1});
    at::Tensor large = at::ones({1'000'000}), small = at::ones({1});
    if (me.rank == 0) {
      auto first = me.group()->all_reduce(large, ReduceOp::Sum);
      auto second = other->all_reduce(small, ReduceOp::Sum);
      second.wait();
      first.wait();
    } else {
      me.group()->all_reduce(large, ReduceOp::Sum).wait();
      other->all_reduce(small, ReduceOp::Sum).wait();
    }
    EXPECT_TRUE(large.equal(at::full({1'000'000}, 2.0)));
    EXPECT_EQ(small.item<float>(), 2.f);
  });
}

TEST(Communicator, ParametersThatRequireGradCanBeBroadcast) {
  run_ranks(2, [](Rank& me) {
    at::Tensor p = at::full({3, 2}, static_cast<double>(me.rank)).t().requires_grad_();
    me.group()->broadcast(p, 1).wait();
    EXPECT_TRUE(p.is_leaf());
    EXPECT_TRUE(at::equal(p.detach(), at::ones({2, 3})));
  });
}

}  // namespace
}  // namespace tessera
