// fully_shard of plain torch::nn modules, which cannot have hooks.
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/nn/grad_hooks.h"
#include "tessera/optim/adam.h"
#include "tessera/testing/detail/counting_allocator.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/fsdp.h"

namespace tessera {
namespace {

using namespace fixtures;
using comm::CommKind;

// An embedding, 3-D activations, a convolution, norms, biases and a bare parameter: ops of all kinds.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    embed = register_module("embed", torch::nn::Embedding(7, 6));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    up = register_module("up", torch::nn::Linear(6, 9));
    conv = register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(5, 3, 2)));
    down = register_module("down", torch::nn::Linear(8, 2));
    scale = register_parameter("scale", torch::ones({1}) * 0.5);
  }
  torch::Tensor forward(torch::Tensor tokens) {
    const auto x = torch::gelu(up(norm(embed(tokens))));  // (B, 5, 9)
    return down(conv(x)) * scale;
  }
  torch::nn::Embedding embed{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::Conv1d conv{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(Net);

at::Tensor loss_of(Net& net, const at::Tensor& tokens) { return net(tokens).pow(2).mean(); }

TEST(FullyShardUnhooked, TrainsLikeThePlainModule) {
  torch::manual_seed(4);
  Net start;
  for (const char* shape : {"dp=2", "dp=3", "replicate=2,shard=2"}) {
    const int64_t ranks = std::string(shape) == "dp=2" ? 2 : std::string(shape) == "dp=3" ? 3 : 4;
    Tensors data;
    for (int64_t r = 0; r < ranks; r++) data.push_back(torch::randint(7, {2, 5}, torch::kLong));
    run_ranks(ranks, [&](Rank& me) {
      Net plain, net;
      const auto values = start->named_parameters();
      for (auto* each : {&plain, &net})
        for (auto& item : (*each)->named_parameters()) item.value().set_data(values[item.key()].detach().clone());
      fully_shard(net, {.mesh = me.mesh(shape)});
      for (const auto& item : net->named_parameters())
        EXPECT_EQ(DTensor(item.value()).placements().back(), Shard(0)) << item.key();
      optim::AdamW plain_opt(plain->parameters(), {.lr = 0.05, .eps = 1e-4}),
          opt(net->parameters(), {.lr = 0.05, .eps = 1e-4});
      for (int step = 0; step < 3; step++) {
        plain_opt.zero_grad();
        opt.zero_grad();
        for (int pass = 0; pass < 2; pass++) {  // the second one accumulates
          fsdp_module(*net).set_requires_gradient_sync(step != 1 || pass == 1);
          CommDebugMode comm;
          const auto loss = loss_of(net, data[static_cast<size_t>(me.rank)]);
          EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllGatherIntoTensor), 10) << "each parameter";
          EXPECT_FALSE(is_dtensor(loss));
          loss.backward();
          EXPECT_EQ(comm.get_comm_counts().of(CommKind::ReduceScatterTensor), step != 1 || pass == 1 ? 10 : 0);
          accumulate_means(plain, data, loss_of);
        }
        expect_gradients(*net, *plain);
        plain_opt.step();
        opt.step();
        const auto wanted = plain->named_parameters();
        for (const auto& item : net->named_parameters())
          EXPECT_EQ(close(full_value(item.value()), wanted[item.key()].detach(), {1e-3, 1e-5}), "") << item.key();
      }
    });
  }
}

// Unsharded parameters are freed after the op that uses them.
TEST(FullyShardUnhooked, KeepsNothingUnsharded) {
  constexpr int64_t kWidth = 256;
  testing::CountingAllocator count;
  run_ranks(2, [&](Rank& me) {
    torch::nn::Sequential net;
    for (int i = 0; i < 8; i++) net->push_back(torch::nn::Linear(kWidth, kWidth));
    fully_shard(*net, {.mesh = me.mesh("dp=2")});
    me.group()->barrier().wait();
    const auto before = count.live_bytes();
    me.group()->barrier().wait();
    const auto y = net->forward(torch::ones({1, kWidth}));
    me.group()->barrier().wait();
    EXPECT_LT(count.live_bytes() - before, kWidth * kWidth * 4) << "eight unsharded weights would take this much";
    me.group()->barrier().wait();
    y.sum().backward();
  });
}

TEST(FullyShardUnhooked, InsideAModuleWithHooks) {
  struct OuterImpl : torch::nn::Module {
    OuterImpl() {
      inner = register_module("inner", torch::nn::Linear(10, 10));
      last = register_module("last", nn::Linear(10, 4));
    }
    torch::Tensor forward(torch::Tensor x) { return last(torch::relu(inner(x))); }
    torch::nn::Linear inner{nullptr};
    nn::Linear last{nullptr};
  };
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    Holder<OuterImpl> plain, model;
    for (auto* each : {&plain, &model})
      for (auto& p : (*each)->parameters()) p.data().copy_(torch::linspace(-1, 1, p.numel()).view(p.sizes()).sin());
    fully_shard(model->inner, {.mesh = me.mesh("dp=2")});
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    const auto loss = [](Holder<OuterImpl>& m, const at::Tensor& x) { return m(x).pow(2).mean(); };
    for (int i = 0; i < 2; i++) {
      loss(model, data[static_cast<size_t>(me.rank)]).backward();
      accumulate_means(plain, data, loss);
      expect_sharded(*model);
      expect_gradients(*model, *plain);
    }
  });
}

TEST(FullyShardUnhooked, ErrorsForOptionsThatNeedHooks) {
  run_ranks(2, [](Rank& me) {
    Net net;
    EXPECT_ERROR(UsageError, fully_shard(net, {.mesh = me.mesh("dp=2"), .mp_policy = {.param_dtype = at::kBFloat16}}),
                 "Net cannot have hooks", "TESSERA_MODULE(Net)");
    EXPECT_FALSE(is_dtensor(net->scale));
    fully_shard(net, {.mesh = me.mesh("dp=2")});
    EXPECT_ERROR(UsageError, fully_shard(net, {.mesh = me.mesh("dp=2")}), "sharded already");
    EXPECT_EQ(fsdp_modules(*net).size(), 1u);
    torch::nn::Linear frozen(3, 3);
    for (auto& p : frozen->parameters()) p.requires_grad_(false);
    fully_shard(frozen, {.mesh = me.mesh("dp=2")});
    EXPECT_ERROR(UsageError, fully_shard(frozen, {.mesh = me.mesh("dp=2")}), "sharded already");
    EXPECT_EQ(frozen(torch::ones({2, 3})).sizes(), (std::vector<int64_t>{2, 3}));
  });
}

}  // namespace
}  // namespace tessera
