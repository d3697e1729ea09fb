#include "tessera/nn/checkpoint_wrapper.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/holder.h"
#include "tessera/nn/modules.h"
#include "tessera/testing/detail/counting_allocator.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

namespace tessera {
namespace {

using testing::error_message;
using testing::Rank;
using testing::run_ranks;

struct FeedForwardImpl : torch::nn::Cloneable<FeedForwardImpl> {
  nn::Linear up{nullptr}, down{nullptr};
  nn::Dropout dropout{nullptr};
  int runs = 0;
  FeedForwardImpl() { reset(); }
  void reset() override {
    up = register_module("up", nn::Linear(8, 32));
    dropout = register_module("dropout", nn::Dropout(0.3));
    down = register_module("down", nn::Linear(32, 8));
  }
  at::Tensor forward(const at::Tensor& x, std::optional<at::Tensor> scale = {}) {
    runs++;
    auto y = x + down(dropout(torch::gelu(up(x))));
    return scale ? y * *scale : y;
  }
};
TESSERA_MODULE(FeedForward);

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  nn::ModuleList<FeedForward> blocks;
  NetImpl() { reset(); }
  void reset() override {
    blocks = register_module("blocks", nn::ModuleList<FeedForward>());
    for (int i = 0; i < 3; i++) blocks->push_back(FeedForward());
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : *blocks) x = block(x, x.mean());
    return x;
  }
};
TESSERA_MODULE(Net);

Tensors step(Net& net, const at::Tensor& x) {
  net->zero_grad();
  torch::manual_seed(4), manual_seed(4);
  net(x).square().sum().backward();
  Tensors grads;
  for (const auto& p : net->parameters()) grads.push_back(p.grad().clone());
  return grads;
}

void expect_equal_tensors(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); i++) EXPECT_TRUE(a[i].equal(b[i])) << i;
}

TEST(CheckpointWrapper, KeepsGradientsAndParameterNames) {
  Net net;
  auto x = torch::rand({4, 8});
  const auto plain = step(net, x);
  const auto names = net->named_parameters().keys();
  for (auto& block : *net->blocks) EXPECT_EQ(&checkpoint_wrapper(block), &block);
  for (auto& block : *net->blocks) block->runs = 0;
  expect_equal_tensors(plain, step(net, x));
  EXPECT_EQ(net->named_parameters().keys(), names);
  for (auto& block : *net->blocks) EXPECT_EQ(block->runs, 2);
  for (auto& block : *net->blocks) EXPECT_EQ(&remove_checkpoint_wrapper(block), &block);
  expect_equal_tensors(plain, step(net, x));
  for (auto& block : *net->blocks) EXPECT_EQ(block->runs, 3);
}

TEST(CheckpointWrapper, CheckFnSelectsModulesAndWrappersNest) {
  Net net;
  auto x = torch::rand({4, 8});
  const auto plain = step(net, x);
  for (auto& block : *net->blocks) block->runs = 0;
  apply_activation_checkpointing(*net, [](const std::string& name, const Module&) {
    return name == "blocks.0" || name == "blocks.2" || name == "blocks.2.down";
  });
  expect_equal_tensors(plain, step(net, x));
  EXPECT_EQ((*net->blocks)[0]->runs, 2);
  EXPECT_EQ((*net->blocks)[1]->runs, 1);
  EXPECT_EQ((*net->blocks)[2]->runs, 2);
  auto copy = clone(net);
  expect_equal_tensors(plain, step(copy, x));
  EXPECT_EQ((*copy->blocks)[0]->runs - (*net->blocks)[0]->runs, 2);
}

TEST(CheckpointWrapper, WrapsChildrenOfATorchSequential) {
  torch::nn::Sequential net(torch::nn::Linear(8, 8), torch::nn::Tanh(), torch::nn::Linear(8, 8));
  auto x = torch::rand({4, 8});
  const auto run = [&] {
    net->zero_grad();
    net->forward(x).square().sum().backward();
    return net->parameters()[0].grad().clone();
  };
  const auto plain = run();
  auto& returned =
      apply_activation_checkpointing(*net, [](const std::string& name, const Module&) { return name != "1"; });
  EXPECT_EQ(&returned, net.get());
  EXPECT_TRUE(has_hook_point(*net->ptr(0)) && has_hook_point(*net->ptr(2)));
  EXPECT_FALSE(has_hook_point(*net->ptr(1)));
  EXPECT_TRUE(run().equal(plain));
}

TEST(CheckpointWrapper, ErrorsNameTheModule) {
  torch::nn::Linear plain(2, 2);
  EXPECT_CONTAINS(error_message<UsageError>([&] { checkpoint_wrapper(plain); }), "Linear");

  Net net;
  checkpoint_wrapper((*net->blocks)[1]);
  auto x = torch::rand({4, 8});
  auto loss = net(x).sum();
  (*net->blocks)[1]->dropout->eval();  // so recomputation has no dropout
  const auto said = error_message<UsageError>([&] { loss.backward(); });
  EXPECT_CONTAINS(said, "was aten::dropout in module Net.blocks.1.dropout in forward");
  EXPECT_CONTAINS(said, "in module Net.blocks.1.down in recomputation");
}

// The outer checkpoint recomputes the inputs of the inner ones, so after forward only the output uses memory.
TEST(CheckpointWrapper, NestedWrappersSaveOnlyTheOutermostInput) {
  constexpr int64_t n = 1 << 16;
  struct ChainImpl : torch::nn::Module {
    nn::Tanh a, b;
    ChainImpl() { register_module("a", a), register_module("b", b); }
    at::Tensor forward(at::Tensor x) { return b(a(x.tanh())).tanh(); }
  };
  Holder<ChainImpl> chain;
  checkpoint_wrapper(chain), checkpoint_wrapper(chain->a), checkpoint_wrapper(chain->b);
  auto x = torch::rand({n}, torch::requires_grad());
  testing::CountingAllocator count;
  auto y = chain(x);
  EXPECT_EQ(count.live_bytes(), 4 * n);
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

struct ByReference {
  at::Tensor t;
  friend void tessera_visit(ByReference& r, auto&& field) { field(r.t); }
};
struct CacheReaderImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x, ByReference& cache) { return (x * cache.t).exp(); }
};
TESSERA_MODULE(CacheReader);

TEST(CheckpointWrapper, AnArgumentByReferenceThrowsInRecomputation) {
  CacheReader reader;
  checkpoint_wrapper(reader);
  auto x = torch::rand({3}, torch::requires_grad());
  ByReference cache{torch::ones({3})};
  auto y = reader(x, cache);
  EXPECT_CONTAINS(error_message<UsageError>([&] { y.sum().backward(); }),
                  "CacheReader takes an argument by non-const reference");
}

TEST(CheckpointWrapper, WorksOnADistributedModel) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    Net net;
    manual_seed(1);
    for (auto& block : *net->blocks) {
      torch::NoGradGuard no_grad;
      for (auto p : block->parameters()) random::uniform_(p, -0.3, 0.3);
      distribute_in_place(block->up->weight, mesh, {Shard(0)});
      distribute_in_place(block->up->bias, mesh, {Shard(0)});
      distribute_in_place(block->down->weight, mesh, {Shard(1)});
      distribute_in_place(block->down->bias, mesh, {Replicate()});
    }
    auto local = torch::empty({4, 8});
    const auto x = distribute_tensor(random::uniform_(local), mesh, {Replicate()});
    const auto plain = step(net, x);
    for (auto& block : *net->blocks) checkpoint_wrapper(block, {.keep = keep_ops({"aten::addmm", "aten::mm"})});
    expect_equal_tensors(plain, step(net, x));
  });
}

}  // namespace
}  // namespace tessera
