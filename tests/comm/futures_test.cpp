// The future of a collective completes although no thread waits for the collective.
#include "tessera/base/error.h"
#include "tessera/comm/communicator.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>

namespace tessera {
namespace {

using testing::Rank;
using Tensors = std::vector<at::Tensor>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

void on_both(int64_t n, const testing::Body& body) {
  for (const char* backend : {"threads", "shm"}) {
    SCOPED_TRACE(backend);
    testing::run_ranks(n, body, {.backend = backend});
  }
}

TEST(Futures, CompleteWithoutWait) {
  on_both(3, [](Rank& me) {
    auto& backend = *me.group()->backend();
    std::vector<Tensors> lists;
    std::vector<FuturePtr> futures;
    for (int64_t numel : {4, 300'000, 0, 70'000, 1}) {  // some fit into a slot, some are sent in chunks
      lists.push_back({at::full({numel}, static_cast<double>(me.rank + 1))});
      futures.push_back(backend.allreduce(lists.back())->getFuture());
    }
    for (size_t i = 0; i < futures.size(); i++) {
      futures[i]->wait();
      EXPECT_TRUE(futures[i]->value().toTensorVector()[0].is_same(lists[i][0]));
      EXPECT_TRUE(lists[i][0].equal(at::full_like(lists[i][0], 6.0)));
    }
  });
}

TEST(Futures, CallbacksMayPost) {
  on_both(2, [](Rank& me) {
    auto& backend = *me.group()->backend();
    Tensors first{at::ones({100'000})}, second{at::ones({100'000})};
    auto chained = backend.allreduce(first)->getFuture()->then(
        [&](c10::ivalue::Future&) -> c10::IValue {
          second[0].add_(first[0]);  // 3
          backend.allreduce(second)->wait();
          return second;
        },
        c10::ListType::create(c10::TensorType::get()));
    chained->wait();
    EXPECT_TRUE(second[0].equal(at::full({100'000}, 6.0)));
  });
}

TEST(Futures, TogetherWithWaitsOnTheSameGroup) {
  on_both(2, [](Rank& me) {
    for (int i = 0; i < 200; i++) {
      Tensors early{at::ones({i % 7 == 0 ? 50'000 : 10})};
      auto future = me.group()->backend()->allreduce(early)->getFuture();
      at::Tensor late = at::ones({3});
      me.group()->all_reduce(late, ReduceOp::Sum).wait();
      future->wait();
      EXPECT_TRUE(early[0].equal(at::full_like(early[0], 2.0)) && late.equal(at::full({3}, 2.0)));
    }
  });
}

TEST(Futures, OfACompletedCollective) {
  on_both(1, [](Rank& me) {
    Tensors xs{at::ones({2})};
    EXPECT_TRUE(me.group()->backend()->allreduce(xs)->getFuture()->completed());
  });
  on_both(2, [](Rank& me) {
    Tensors xs{at::ones({2})};
    auto work = me.group()->backend()->allreduce(xs);
    work->wait();
    EXPECT_TRUE(work->getFuture()->completed());
  });
}

TEST(Futures, FailWhenTheGroupIsAborted) {
  on_both(2, [](Rank& me) {
    auto group = me.world.new_group({0, 1}, "lost");
    Tensors xs{at::ones({100'000})};
    if (me.rank == 0) {
      auto future = group->backend()->allreduce(xs)->getFuture();
      me.group()->barrier().wait();
      EXPECT_CONTAINS(testing::error_message<CommError>([&] { future->waitAndThrow(); }), "no more");
    } else {
      me.group()->barrier().wait();
      group->abort("no more");
    }
  });
}

TEST(Futures, FailWhenTheGroupCloses) {
  on_both(2, [](Rank& me) {
    FuturePtr future;
    auto group = me.world.new_group({0, 1});
    me.group()->barrier().wait();  // the peer has connected the group, too
    if (me.rank == 0) {
      Tensors xs{at::ones({100'000})};
      future = group->backend()->allreduce(xs)->getFuture();  // the peer never posts it
      group->close();
      EXPECT_TRUE(future->hasError());
    }
    me.group()->barrier().wait();
  });
}

}  // namespace
}  // namespace tessera
