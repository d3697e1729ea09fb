// DistributedDataParallel::join: ranks with different numbers of batches. tests/parity/data_parallel_test.cpp compares
// it with PyTorch's.
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/nn/modules.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"
#include "tests/fixtures/data_parallel.h"

namespace tessera {
namespace {

using namespace fixtures;

struct JoinNetImpl : torch::nn::Module {
  JoinNetImpl() {
    linear = register_module("linear", nn::Linear(4, 3));
    norm = register_module("norm", nn::BatchNorm1d(3));
    const torch::NoGradGuard no_grad;
    for (auto& p : parameters()) p.copy_(torch::sin(torch::arange(p.numel()) + 1.0).view_as(p));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)); }
  nn::Linear linear{nullptr};
  nn::BatchNorm1d norm{nullptr};
};
TESSERA_MODULE(JoinNet);

at::Tensor join_batch(int64_t rank, int64_t step) {
  return torch::cos(torch::arange(20).view({5, 4}) *
                    (1.0 + static_cast<double>(rank) + 0.3 * static_cast<double>(step)));
}
int64_t batches_of(int64_t rank) { return 2 * rank; }  // rank 0 has none

// After join(), all ranks have the parameters and buffers of the last rank; each step of the ranks that are left is one
// with the mean over all ranks, or over those that are left.
TEST(Join, RanksWithDifferentNumbersOfBatches) {
  for (const bool by_all : {true, false})
    run_ranks(3, [&](Rank& me) {
      JoinNet model;
      DistributedDataParallel ddp(model);
      optim::SGD optimizer(ddp->parameters(), {.lr = 0.1});
      int64_t steps = 0;
      ddp->join(
          [&] {
            for (; steps < batches_of(me.rank); steps++) {
              optimizer.zero_grad();
              {
                const torch::NoGradGuard validation;  // no collective
                ddp(join_batch(me.rank, steps));
              }
              ddp(join_batch(me.rank, steps)).pow(2).sum().backward();
              optimizer.step();
            }
          },
          {.divide_by_initial_world_size = by_all});
      EXPECT_EQ(steps, batches_of(me.rank));

      // The same on one rank: sums of the gradients of the ranks that have a batch.
      JoinNet plain;
      optim::SGD reference(plain->parameters(), {.lr = 0.1});
      for (int64_t step = 0; step < batches_of(2); step++) {
        reference.zero_grad();
        int64_t active = 0;
        for (const int64_t rank : {1, 2})
          if (step < batches_of(rank)) active++, plain(join_batch(rank, step)).pow(2).sum().backward();
        for (const auto& p : plain->parameters()) p.mutable_grad() /= by_all ? 3 : active;
        reference.step();
      }
      const auto found = model->named_parameters(), expected = plain->named_parameters();
      for (const auto& item : expected)
        EXPECT_TRUE(torch::allclose(found[item.key()], item.value(), 1e-4, 1e-5)) << item.key() << " by_all " << by_all;
      for (const auto& buffer : model->named_buffers()) {
        auto largest = buffer.value().to(torch::kDouble).clone(), smallest = largest.clone();
        me.group()->all_reduce(largest, ReduceOp::Max).wait();
        me.group()->all_reduce(smallest, ReduceOp::Min).wait();
        EXPECT_TRUE(torch::equal(largest, smallest)) << buffer.key();
      }
      // Afterwards the ranks train together again.
      ddp(join_batch(me.rank, 9)).pow(2).sum().backward();
    });
}

TEST(Join, NoSyncInside) {
  run_ranks(2, [](Rank& me) {
    JoinNet model;
    DistributedDataParallel ddp(model);
    ddp->join([&] {
      for (int64_t step = 0; step <= me.rank; step++) {
        {
          const auto guard = ddp->no_sync();
          for (int64_t pass = 0; pass < 1 + me.rank; pass++) ddp(join_batch(me.rank, pass)).sum().backward();
        }
        ddp(join_batch(me.rank, 7)).sum().backward();
      }
    });
  });
}

TEST(Join, EarlyTerminationNamesTheRank) {
  run_ranks(3, [](Rank& me) {
    JoinNet model;
    DistributedDataParallel ddp(model);
    const auto train = [&] {
      for (int64_t step = 0; step < (me.rank == 1 ? 1 : 3); step++) ddp(join_batch(me.rank, step)).sum().backward();
    };
    EXPECT_ERROR(UsageError, ddp->join(train, {.throw_on_early_termination = true}), "ranks [1] have no more batches");
  });
}

TEST(Join, ARankThatRunsOtherPassesIsNamed) {
  run_ranks(2, [](Rank& me) {
    JoinNet model;
    DistributedDataParallel ddp(model);
    const auto train = [&] {
      auto loss = ddp(join_batch(me.rank, 0)).sum();
      if (me.rank == 1) ddp(join_batch(me.rank, 1));
      loss.backward();
    };
    EXPECT_ERROR(UsageError, ddp->join(train), "ranks [1] run a forward and ranks [0] a backward");
  });
}

TEST(Join, DisabledRunsTheBody) {
  run_ranks(2, [](Rank&) {
    JoinNet model;
    DistributedDataParallel ddp(model);
    bool ran = false;
    ddp->join([&] { ran = true; }, {.enable = false});
    EXPECT_TRUE(ran);
  });
}

}  // namespace
}  // namespace tessera
