// Comm hooks of FullyShardedDataParallel and custom collectives of fully_shard: gradients are those without them, and
// the hooks get what PyTorch's get.
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/expect_error.h"
#include "tests/fixtures/data_parallel.h"

namespace tessera {
namespace {

using namespace fixtures;

Tensors fsdp_gradients(const torch::nn::Module& module) {
  Tensors all;
  for (const auto& p : module.parameters())
    all.push_back(is_dtensor(p) ? DTensor(p.grad()).full_tensor() : p.grad().clone());
  return all;
}

// Gradients of two passes of an FSDP1 wrapper, of which the second accumulates.
Tensors train_with_hook(Rank& me, const MLP& start, const Tensors& data, ShardingStrategy strategy,
                        const auto& register_hook) {
  FullyShardedDataParallel fsdp(clone(start), {.sharding_strategy = strategy});
  register_hook(fsdp);
  for (int64_t pass = 0; pass < 2; pass++) fsdp(data[me.rank + pass * me.size()]).pow(2).mean().backward();
  Tensors all;
  for (const auto& flat : fsdp->flat_params()) all.push_back(flat.grad().clone());
  return all;
}

TEST(FSDPCommHooks, DefaultHooksAreTheReductionWithoutAHook) {
  const auto start = mlp();
  for (const int64_t n : {1, 2, 3, 4}) {
    const auto data = batches(2 * n);
    run_ranks(n, [&](Rank& me) {
      const auto none = [](auto&) {};
      const auto plain = train_with_hook(me, start, data, ShardingStrategy::FullShard, none);
      const auto hooked = [&](auto hook) {
        return train_with_hook(me, start, data, ShardingStrategy::FullShard, [&](auto& fsdp) {
          fsdp->register_comm_hook(comm_hooks::DefaultState(me.group()), hook);
        });
      };
      EXPECT_EQ(close(hooked(comm_hooks::reduce_scatter_hook), plain, {1e-5, 1e-6}), "") << n;
      EXPECT_EQ(close(hooked(comm_hooks::bf16_compress_hook), plain, {3e-2, 1e-3}), "") << n;
      EXPECT_EQ(close(hooked(comm_hooks::fp16_compress_hook), plain, {1e-2, 1e-3}), "") << n;
      const auto unsharded = train_with_hook(me, start, data, ShardingStrategy::NoShard, none);
      const auto with = train_with_hook(me, start, data, ShardingStrategy::NoShard, [&](auto& fsdp) {
        fsdp->register_comm_hook(comm_hooks::DefaultState(me.group()), comm_hooks::allreduce_hook);
      });
      EXPECT_EQ(close(with, unsharded, {1e-5, 1e-6}), "") << n;
    });
  }
}

// A hook without communication: the rank's own part of its own gradients.
TEST(FSDPCommHooks, GetUnsharedGradientsAndTheShard) {
  const auto start = mlp();
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start);
    const auto& x = data[static_cast<size_t>(me.rank)];
    plain(x).pow(2).mean().backward();
    Tensors parts;
    for (const auto& p : plain->parameters()) parts.push_back(p.grad().flatten());
    auto expected = torch::cat(parts);
    expected = torch::constant_pad_nd(expected, {0, expected.numel() % 2});
    FullyShardedDataParallel fsdp(clone(start));
    int64_t calls = 0;
    fsdp->register_comm_hook(me.rank, [&](int64_t& rank, at::Tensor& grad, at::Tensor& output) {
      calls++;
      EXPECT_EQ(close(grad, expected), "");
      output.copy_(grad.chunk(2)[rank]);
    });
    fsdp(x).pow(2).mean().backward();
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(close(fsdp->flat_params()[0].grad(), expected.chunk(2)[me.rank]), "");
  });
}

TEST(FSDPCommHooks, WrongHooks) {
  run_ranks(2, [&](Rank& me) {
    const auto sharded_hook = [](int&, at::Tensor&, at::Tensor&) {};
    const auto plain_hook = [](int&, at::Tensor&) {};
    FullyShardedDataParallel fsdp(mlp());
    EXPECT_ERROR(UsageError, fsdp->register_comm_hook(0, plain_hook), "hook(state, grad, output)");
    fsdp->register_comm_hook(0, sharded_hook);
    EXPECT_ERROR(UsageError, fsdp->register_comm_hook(0, sharded_hook), "already");
    FullyShardedDataParallel unsharded(mlp(), {.sharding_strategy = ShardingStrategy::NoShard});
    EXPECT_ERROR(UsageError, unsharded->register_comm_hook(0, sharded_hook), "NO_SHARD", "hook(state, grad)");
    FullyShardedDataParallel hybrid(
        mlp(), {.device_mesh = me.mesh({2, 1}, {"r", "s"}), .sharding_strategy = ShardingStrategy::HybridShard});
    EXPECT_ERROR(UsageError, hybrid->register_comm_hook(0, sharded_hook), "hook(state, grad)");
  });
}

struct OwnAllGather final : AllGather {
  int64_t calls = 0;
  at::Tensor memory;
  at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options) override {
    if (!memory.defined() || memory.sizes() != sizes) memory = at::empty(sizes, options);
    return memory;
  }
  comm::Work operator()(at::Tensor& output, const at::Tensor& input, const comm::Group& group, bool) override {
    calls++;
    return group->all_gather_into_tensor(output, input);
  }
};
struct OwnReduceScatter final : ReduceScatter {
  int64_t calls = 0;
  comm::Work operator()(at::Tensor& output, const at::Tensor& input, const comm::Group& group, ReduceOp op,
                        bool) override {
    calls++;
    group->reduce_scatter_tensor(output, input, op).wait();
    return {};
  }
};

TEST(FSDPCommHooks, CustomCollectivesOfFullyShard) {
  const auto start = mlp();
  for (const int64_t n : {1, 2, 3})
    for (const int64_t dim : {0, 1}) {  // shards of dim 1 are not contiguous
      const auto data = batches(2 * n);
      run_ranks(n, [&](Rank& me) {
        const auto train = [&](MLP& model) {
          for (int64_t pass = 0; pass < 2; pass++) model(data[me.rank + pass * n]).pow(2).mean().backward();
        };
        const FullyShardOptions options{.mesh = me.mesh({n}, {"fsdp"}), .shard_placement_fn = [&](const at::Tensor& p) {
                                          return std::optional(std::min(dim, p.dim() - 1));
                                        }};
        auto plain = clone(start), model = clone(start);
        fully_shard(plain, options);
        fully_shard(model, options);
        const auto gather = std::make_shared<OwnAllGather>();
        const auto scatter = std::make_shared<OwnReduceScatter>();
        fsdp_module(model).set_custom_all_gather(gather);
        fsdp_module(model).set_custom_reduce_scatter(scatter);
        double seen = 0;
        fsdp_module(model).set_all_reduce_hook([&](at::Tensor& reduced) {
          seen += reduced.pow(2).sum().item<double>();
          reduced.mul_(2);
        });
        train(plain);
        train(model);
        auto doubled = fsdp_gradients(*plain);
        for (auto& gradient : doubled) gradient = gradient * 2;
        EXPECT_EQ(close(fsdp_gradients(*model), doubled, {1e-5, 1e-6}), "") << n << " ranks, dim " << dim;
        EXPECT_GT(seen, 0);
        EXPECT_GE(gather->calls, n == 1 ? 0 : 2);
        EXPECT_EQ(scatter->calls, 2);
      });
    }
}

}  // namespace
}  // namespace tessera
