#include "tessera/data_parallel/comm_hook.h"

#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/data_parallel.h"

#include <gtest/gtest.h>

#include <optional>

namespace tessera {
namespace {

using namespace fixtures;
using comm::CommKind;

// The expected result of a hook, computed from the gradients of all ranks on one rank.
using Reference = std::function<at::Tensor(const Tensors& ranks)>;

template <class Hook>
void compare(Hook hook, const Reference& reference, int64_t bytes_of_a_value) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  std::vector<Tensors> own;
  for (const auto& batch : data) {
    auto plain = clone(start);
    plain(batch).pow(2).mean().backward();
    own.push_back(gradients_of(*plain));
  }
  for (const bool as_view : {false, true})
    run_ranks(2, [&](Rank& me) {
      auto model = clone(start);
      DistributedDataParallel ddp(model, {.bucket_cap_mb = kTinyMb, .gradient_as_bucket_view = as_view});
      ddp->register_comm_hook(nullptr, hook);
      for (int step = 0; step < 3; step++) {
        ddp->zero_grad();
        CommDebugMode comm;
        ddp(data[static_cast<size_t>(me.rank)]).pow(2).mean().backward();
        EXPECT_EQ(comm.get_total_counts(), step == 0 ? 1 : 2);
        EXPECT_EQ(comm.get_bytes_by_axis().begin()->second, (160 + 16 + 160 + 10) * bytes_of_a_value);
        const auto found = gradients_of(*ddp);
        for (size_t i = 0; i < found.size(); i++)
          EXPECT_EQ(close(found[i], reference({own[0][i], own[1][i]}), kExact), "") << step << " " << i;
      }
    });
}

at::Tensor in(c10::ScalarType dtype, const Tensors& ranks) {
  return (ranks[0].to(dtype) / 2 + ranks[1].to(dtype) / 2).to(torch::kFloat);
}

TEST(CommHook, AllReduce) {
  compare(
      allreduce_hook, [](const Tensors& g) { return g[0] / 2 + g[1] / 2; }, 4);
}
TEST(CommHook, HalfPrecision) {
  compare(
      fp16_compress_hook, [](const Tensors& g) { return in(torch::kHalf, g); }, 2);
}
TEST(CommHook, BFloat16) {
  compare(
      bf16_compress_hook, [](const Tensors& g) { return in(torch::kBFloat16, g); }, 2);
}
TEST(CommHook, ALambdaIsAHook) {
  const auto sum = [](std::nullptr_t, GradBucket& bucket) {  // not divided: DDP does not divide for a hook
    comm::all_reduce_(bucket.buffer(), ReduceOp::Sum, bucket.group());
    return bucket.buffer();
  };
  compare(
      sum, [](const Tensors& g) { return g[0] + g[1]; }, 4);
}
TEST(CommHook, AFunctionFinishesTheResultAfterTheCollective) {
  const auto doubled = [](std::nullptr_t, GradBucket& bucket) -> BucketResult {
    const auto reduced = funcol::all_reduce(bucket.buffer(), ReduceOp::Sum, bucket.group());
    return [reduced, group = bucket.group()] {
      funcol::wait(reduced, group);
      return reduced * 2;
    };
  };
  compare(
      doubled, [](const Tensors& g) { return (g[0] + g[1]) * 2; }, 4);
}

TEST(CommHook, GetsTheBuckets) {
  struct Seen {
    std::vector<std::string> said;
  };
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    DistributedDataParallel ddp(model, {.bucket_cap_mb = kTinyMb});
    auto seen = std::make_shared<Seen>();
    ddp->register_comm_hook(seen, [](const std::shared_ptr<Seen>& s, GradBucket& bucket) {
      s->said.push_back(c10::str(bucket.index(), bucket.is_last() ? " last" : "", " of ", bucket.parameters().size()));
      EXPECT_EQ(bucket.gradients().size(), bucket.parameters().size());
      for (size_t i = 0; i < bucket.gradients().size(); i++) {
        EXPECT_EQ(bucket.gradients()[i].sizes(), bucket.parameters()[i].sizes());
        EXPECT_EQ(bucket.gradients()[i].storage().data(), bucket.buffer().storage().data());
      }
      return allreduce_hook(nullptr, bucket);
    });
    for (int step = 0; step < 2; step++) ddp(data[static_cast<size_t>(me.rank)]).sum().backward();
    EXPECT_EQ(seen->said, (std::vector<std::string>{"0 last of 4", "0 of 2", "1 last of 2"}));
  });
}

TEST(CommHook, MayReturnAC10dFuture) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    DistributedDataParallel ddp(model);
    ddp->register_comm_hook(nullptr, [](std::nullptr_t, GradBucket& bucket) -> BucketResult {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
      auto x = funcol::all_reduce(bucket.buffer() / 2, ReduceOp::Sum, bucket.group());
      funcol::wait(x, bucket.group());
      future->markCompleted(c10::IValue(std::vector<at::Tensor>{x}));
      return future;
    });
    ddp(data[static_cast<size_t>(me.rank)]).pow(2).mean().backward();
    accumulate_means(plain, data, square_loss);
    EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain), kExact), "");
  });
}

// Optimizer steps in backward give the same parameters as steps after it, and free all gradients.
TEST(CommHook, StepsInBackward) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    DistributedDataParallel ddp(model, {.bucket_cap_mb = kTinyMb});
    std::map<const void*, std::unique_ptr<optim::SGD>> optimizers;
    for (const auto& p : model->parameters())
      optimizers[p.unsafeGetTensorImpl()] =
          std::make_unique<optim::SGD>(Tensors{p}, optim::SGDOptions{.lr = 0.5, .momentum = 0.9});
    ddp->step_in_backward([&](const at::Tensor& p) { optimizers.at(p.unsafeGetTensorImpl())->step(); });
    optim::SGD opt(plain->parameters(), {.lr = 0.5, .momentum = 0.9});
    for (int step = 0; step < 3; step++) {
      ddp(data[static_cast<size_t>(me.rank)]).pow(2).mean().backward();
      for (const auto& p : model->parameters()) EXPECT_FALSE(p.grad().defined());
      opt.zero_grad();
      accumulate_means(plain, data, square_loss);
      opt.step();
    }
    EXPECT_EQ(close(values_of(*ddp), values_of(*plain), kExact), "");
  });
}

// With factors of full rank nothing is lost; with rank 1 less is sent, and error feedback makes up for the loss: the
// sum of the gradients over many steps comes close to the true sum.
TEST(CommHook, PowerSGD) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start);
    accumulate_means(plain, data, square_loss);
    const auto wanted = gradients_of(*plain);
    for (const int64_t rank : {1, 16})
      for (const bool warm : {false, true}) {
        auto model = clone(start);
        DistributedDataParallel ddp(model, {.bucket_cap_mb = kTinyMb});
        auto state = std::make_shared<PowerSGDState>();
        state->matrix_approximation_rank = rank;
        state->start_powerSGD_iter = 2;
        state->min_compression_rate = rank == 1 ? 2 : 0.01;
        state->warm_start = warm;
        ddp->register_comm_hook(state, powerSGD_hook);
        Tensors sum;
        constexpr int kSteps = 40;
        for (int step = 0; step < kSteps; step++) {
          ddp->zero_grad();
          CommDebugMode comm;
          ddp(data[static_cast<size_t>(me.rank)]).pow(2).mean().backward();
          if (rank == 1 && step == kSteps - 1) {
            EXPECT_LT(comm.get_bytes_by_axis().begin()->second, (160 + 16 + 160 + 10) * 4 / 2);
          }
          const auto found = gradients_of(*ddp);
          for (size_t i = 0; i < found.size(); i++) {
            if (step < 2 || rank == 16) {
              EXPECT_EQ(close(found[i], wanted[i], {1e-4, 1e-5}), "") << step << " " << i;
            }
            if (sum.size() <= i) sum.push_back(torch::zeros_like(found[i]));
            sum[i] += found[i] / kSteps;
          }
        }
        for (size_t i = 0; i < sum.size(); i++) {
          const auto error = (sum[i] - wanted[i]).norm().item<double>() / wanted[i].norm().item<double>();
          EXPECT_LT(error, 0.2) << "rank " << rank << ", parameter " << i;
        }
        EXPECT_EQ(state->iter, kSteps);
      }
  });
}

// A guard can be kept in a container, and the last one that is destroyed ends it.
TEST(CommHook, NoSyncMoves) {
  const MLP start(models::mlp_module());
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    DistributedDataParallel ddp(model);
    const auto sends = [&] {
      CommDebugMode comm;
      ddp(batches(2)[static_cast<size_t>(me.rank)]).sum().backward();
      return comm.get_total_counts() > 0;
    };
    std::optional<data_parallel::NoSync> kept;
    {
      auto guard = ddp->no_sync();
      kept = std::move(guard);
    }
    EXPECT_FALSE(sends());
    std::vector<data_parallel::NoSync> list;
    list.push_back(std::move(*kept));
    kept.reset();
    EXPECT_FALSE(sends());
    list.clear();
    EXPECT_TRUE(sends());
  });
}

}  // namespace
}  // namespace tessera
