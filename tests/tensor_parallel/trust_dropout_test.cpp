// Dropout of plain tensors in a parallelized model: functional dropout draws what nn::Dropout draws, on every rank.
#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/modules.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::close;
using testing::Rank;
using testing::run_ranks;

enum class DropoutKind { Module, Function, InPlace, TorchFunctional, Alpha };

// Dropout of a sharded tensor, of a replicated one, and of the input, as a module or as a function.
struct DropoutsImpl : torch::nn::Cloneable<DropoutsImpl> {
  explicit DropoutsImpl(DropoutKind kind) : kind(kind) { reset(); }
  void reset() override {
    embed = register_module("embed", nn::Linear(4, 4));
    if (kind == DropoutKind::Module) drop1 = register_module("drop1", nn::Dropout(0.5));
    up = register_module("up", nn::Linear(4, 6));
    if (kind == DropoutKind::Module) drop2 = register_module("drop2", nn::Dropout(0.5));
    down = register_module("down", nn::Linear(6, 4));
    if (kind == DropoutKind::Module) drop3 = register_module("drop3", nn::Dropout(0.5));
  }
  torch::Tensor dropped(nn::Dropout& module, const torch::Tensor& x) {
    switch (kind) {
      case DropoutKind::Module:
        return module(x);
      case DropoutKind::Function:
        return torch::dropout(x, 0.5, is_training());
      case DropoutKind::InPlace: {
        auto y = x * 1;
        return torch::dropout_(y, 0.5, is_training());
      }
      case DropoutKind::TorchFunctional:
        return torch::nn::functional::dropout(
            x, torch::nn::functional::DropoutFuncOptions().p(0.5).training(is_training()));
      case DropoutKind::Alpha:
        return torch::alpha_dropout(x, 0.5, is_training());
    }
    return {};
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = dropped(drop1, embed(x));  // embed is not in the plan
    return dropped(drop3, y + down(dropped(drop2, torch::gelu(up(y)))));
  }
  DropoutKind kind;
  nn::Linear embed{nullptr}, up{nullptr}, down{nullptr};
  nn::Dropout drop1{nullptr}, drop2{nullptr}, drop3{nullptr};
};
TESSERA_MODULE(Dropouts);

template <class H>
void fill_same(H& model) {
  torch::NoGradGuard no_grad;
  const random::SeedScope seed(3);
  for (auto& p : model->parameters()) random::uniform_(p, -1, 1);
}

// The functions find the placement themselves; nn::Dropout needs it in the plan.
void parallelize_dropouts(Dropouts& model, const DeviceMesh& mesh, DropoutKind kind) {
  const Layouts sharded = Shard(-1);
  Plan plan{{"up", ColwiseParallel()}, {"down", RowwiseParallel()}};
  if (kind == DropoutKind::Module)
    plan.add("drop2", PrepareModuleInputOutput{sharded, sharded, false, sharded, sharded});
  parallelize_module(model, mesh, plan);
}

// The outputs of n ranks, and the gradients of `embed`.
std::vector<Tensors> run_dropouts(int64_t n, DropoutKind kind) {
  std::vector<Tensors> each(static_cast<size_t>(n));
  run_ranks(n, [&](Rank& me) {
    torch::manual_seed(me.rank);  // LibTorch's generators differ between ranks
    Dropouts model(kind);
    fill_same(model);
    parallelize_dropouts(model, me.mesh("tp=" + std::to_string(n)), kind);
    manual_seed(7);
    const auto y = model(torch::ones({3, 4}));
    y.sum().backward();
    each[me.rank] = {y.detach(), model->embed->weight.grad()};
  });
  return each;
}

TEST(TrustDropout, FunctionsDrawWhatTheModuleDraws) {
  const auto expected = run_dropouts(1, DropoutKind::Module)[0];
  EXPECT_GT((expected[0] == 0).sum().item<int64_t>(), 0);
  for (const auto kind :
       {DropoutKind::Module, DropoutKind::Function, DropoutKind::InPlace, DropoutKind::TorchFunctional})
    for (const int64_t n : {2, 3, 4})
      for (const auto& found : run_dropouts(n, kind)) {
        SCOPED_TRACE(c10::str("kind ", static_cast<int>(kind), ", ", n, " ranks"));
        EXPECT_EQ(close(found, expected), "");
      }
  const auto alpha = run_dropouts(1, DropoutKind::Alpha)[0];
  for (const auto& found : run_dropouts(2, DropoutKind::Alpha)) EXPECT_EQ(close(found, alpha), "");
}

TEST(TrustDropout, ACloneDrawsTheSame) {
  run_ranks(2, [](Rank& me) {
    torch::manual_seed(me.rank);
    Dropouts model(DropoutKind::Function);
    fill_same(model);
    parallelize_module(model, me.mesh("tp=2"), {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    auto copy = clone(model);
    manual_seed(7);
    const auto y = model(torch::ones({3, 4}));
    manual_seed(7);
    EXPECT_TRUE(torch::equal(copy(torch::ones({3, 4})), y));
  });
}

// Attention weights (B, H, T, T) of local heads.
struct AttentionDropoutImpl : torch::nn::Module {
  explicit AttentionDropoutImpl(bool fused_kernel) : fused_kernel(fused_kernel) {
    qkv = register_module("qkv", nn::Linear(12, 36));
    wo = register_module("wo", nn::Linear(12, 12));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = qkv(x).view({2, 3, 3, -1, 2}).unbind(2);  // (B, T, H, D)
    const auto q = parts[0].transpose(1, 2), k = parts[1].transpose(1, 2), v = parts[2].transpose(1, 2);
    const auto y = fused_kernel
                       ? torch::scaled_dot_product_attention(q, k, v, {}, 0.4, /*is_causal=*/true)
                       : torch::dropout(torch::softmax(q.matmul(k.transpose(-1, -2)), -1), 0.4, true).matmul(v);
    return wo(y.transpose(1, 2).flatten(2));
  }
  bool fused_kernel;
  nn::Linear qkv{nullptr}, wo{nullptr};
};
TESSERA_MODULE(AttentionDropout);

TEST(TrustDropout, AttentionDrawsByGlobalHead) {
  const auto run = [](int64_t n, const Plan& plan) {
    std::vector<Tensors> each(static_cast<size_t>(n));
    run_ranks(n, [&](Rank& me) {
      torch::manual_seed(me.rank);
      AttentionDropout model(true);
      fill_same(model);
      parallelize_module(model, me.mesh("tp=" + std::to_string(n)), plan);
      manual_seed(7);
      const auto y = model(torch::linspace(-1, 1, 72).view({2, 3, 12}));
      y.pow(2).sum().backward();
      each[me.rank] = {y.detach(), DTensor(model->qkv->weight.grad()).full_tensor().detach()};
    });
    return each;
  };
  const Plan plan{{"qkv", ColwiseParallel{.sections = 3}}, {"wo", RowwiseParallel()}};
  const auto expected = run(1, plan)[0];
  for (const int64_t n : {2, 3})  // 6 heads
    for (const auto& found : run(n, plan)) EXPECT_EQ(close(found, expected), "") << n;
}

TEST(TrustDropout, AShardWithoutAKnownPlacementThrows) {
  run_ranks(2, [](Rank& me) {
    AttentionDropout model(false);
    parallelize_module(model, me.mesh("tp=2"), {{"qkv", ColwiseParallel{.sections = 3}}, {"wo", RowwiseParallel()}});
    EXPECT_ERROR(UsageError, model(torch::ones({2, 3, 12})), "torch::dropout", "module AttentionDropout",
                 "placement is not known", "nn::Dropout");
  });
}

// Without autograd history the placement of a shard is not known. The values are compared: a replicated tensor draws as
// nn::Dropout does, a shard throws on every rank.
TEST(TrustDropout, AShardWithoutHistoryThrows) {
  const auto run = [](int64_t n, DropoutKind kind) {
    std::vector<at::Tensor> each(static_cast<size_t>(n));
    run_ranks(n, [&](Rank& me) {
      const torch::NoGradGuard no_grad;
      Dropouts model(kind);
      fill_same(model);
      parallelize_dropouts(model, me.mesh("tp=" + std::to_string(n)), kind);
      for (int i = 0; i < 2; i++) {  // the second time a shard was returned before
        manual_seed(7);
        if (n > 1 && kind == DropoutKind::Function)
          EXPECT_ERROR(UsageError, model(torch::ones({3, 4})), "torch::dropout", "module Dropouts",
                       "differ between the ranks", "without autograd history", "nn::Dropout");
        else
          each[me.rank] = model(torch::ones({3, 4}));
      }
    });
    return each;
  };
  const auto expected = run(1, DropoutKind::Module)[0];
  EXPECT_EQ(close(run(1, DropoutKind::Function)[0], expected), "");
  for (const auto& found : run(2, DropoutKind::Module)) EXPECT_EQ(close(found, expected), "");
  run(2, DropoutKind::Function);
  run(3, DropoutKind::Function);
}

TEST(TrustDropout, AShardOfFrozenParametersThrows) {
  run_ranks(2, [](Rank& me) {
    Dropouts model(DropoutKind::Function);
    fill_same(model);
    parallelize_module(model, me.mesh("tp=2"), {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    for (auto& p : model->parameters()) p.set_requires_grad(false);
    for (int i = 0; i < 2; i++)
      EXPECT_ERROR(UsageError, model(torch::ones({3, 4})), "torch::dropout", "differ between the ranks");
  });
}

// Recomputation draws what forward drew, also where the argument of the checkpoint is a local shard.
enum class CheckpointBegins { Never, BeforeTheShard, AtTheShard, AfterAnOp };

struct CheckpointedDropoutImpl : torch::nn::Module {
  explicit CheckpointedDropoutImpl(CheckpointBegins begins) : begins(begins) {
    up = register_module("up", nn::Linear(4, 6));
    down = register_module("down", nn::Linear(6, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto dropped = [](const torch::Tensor& h) { return torch::dropout(h, 0.5, true).sin(); };
    switch (begins) {
      case CheckpointBegins::Never:
        return down(dropped(up(x)));
      case CheckpointBegins::BeforeTheShard:
        return down(checkpoint([&](const torch::Tensor& t) { return dropped(up(t)); }, x));
      case CheckpointBegins::AtTheShard:
        return down(checkpoint(dropped, up(x)));
      case CheckpointBegins::AfterAnOp:
        return down(checkpoint([&](const torch::Tensor& t) { return dropped(t * 1); }, up(x) * 1));
    }
    return {};
  }
  CheckpointBegins begins;
  nn::Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(CheckpointedDropout);

TEST(TrustDropout, RecomputationDrawsWhatForwardDrew) {
  run_ranks(2, [&](Rank& me) {
    torch::manual_seed(me.rank);
    Tensors expected;
    for (const auto begins : {CheckpointBegins::Never, CheckpointBegins::BeforeTheShard, CheckpointBegins::AtTheShard,
                              CheckpointBegins::AfterAnOp}) {
      CheckpointedDropout model(begins);
      fill_same(model);
      parallelize_module(model, me.mesh("tp=2"), {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
      manual_seed(7);
      const auto y = model(torch::linspace(-1, 1, 12).view({3, 4}));
      y.pow(2).sum().backward();
      const Tensors found = {y.detach(), DTensor(model->up->weight.grad()).full_tensor().detach()};
      if (expected.empty()) expected = found;
      EXPECT_EQ(close(found, expected), "") << static_cast<int>(begins);
    }
  });
}

// Dropout in the code of a root, before a block with dropouts. The root may have a Tessera holder or not.
struct DropoutRootImpl : torch::nn::Module {
  explicit DropoutRootImpl(bool drops) : drops(drops) {
    first = register_module("first", nn::Linear(4, 4));
    block = register_module("block", Dropouts(DropoutKind::Function));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = first(x);
    return block(drops ? torch::dropout(y, 0.5, true) : y);
  }
  bool drops;
  nn::Linear first{nullptr};
  Dropouts block{nullptr};
};
TESSERA_MODULE(DropoutRoot);
TORCH_MODULE_IMPL(PlainDropoutRoot, DropoutRootImpl);

template <class Root>
std::vector<Tensors> run_dropout_root(int64_t n, bool drops, bool block_alone) {
  std::vector<Tensors> each(static_cast<size_t>(n));
  run_ranks(n, [&](Rank& me) {
    torch::manual_seed(me.rank);
    Root model(drops);
    fill_same(model);
    const auto mesh = me.mesh("tp=" + std::to_string(n));
    if (block_alone)
      parallelize_module(model->block, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    else
      parallelize_module(*model, mesh, {{"block.up", ColwiseParallel()}, {"block.down", RowwiseParallel()}});
    manual_seed(7);
    const auto y = model->forward(torch::ones({3, 4}));
    y.sum().backward();
    each[me.rank] = {y.detach(), model->first->weight.grad()};
  });
  return each;
}

TEST(TrustDropout, CodeAroundAParallelizedBlockDrawsTheSame) {
  const auto expected = run_dropout_root<DropoutRoot>(1, true, false)[0];
  for (const bool block_alone : {false, true})
    for (const auto& found : run_dropout_root<DropoutRoot>(2, true, block_alone)) {
      SCOPED_TRACE(block_alone);
      EXPECT_EQ(close(found, expected), "");
    }
}

TEST(TrustDropout, ModulesUnderARootWithoutAHolderDrawTheSame) {
  const auto expected = run_dropout_root<DropoutRoot>(1, false, false)[0];
  for (const auto& found : run_dropout_root<PlainDropoutRoot>(2, false, false)) EXPECT_EQ(close(found, expected), "");
}

// Outside of all modules with holders, a dropout can belong to any model.
TEST(TrustDropout, CodeOfARootWithoutAHolderThrows) {
  run_ranks(2, [](Rank& me) {
    PlainDropoutRoot model(true);
    fill_same(model);
    torch::dropout(torch::ones({4}), 0.5, true);  // before the model is parallelized
    parallelize_module(*model, me.mesh("tp=2"), {{"block.up", ColwiseParallel()}, {"block.down", RowwiseParallel()}});
    model->eval();
    model->drops = false;
    EXPECT_TRUE(model->forward(torch::ones({3, 4})).defined());
    model->drops = true;
    for (int i = 0; i < 2; i++)
      EXPECT_ERROR(UsageError, model->forward(torch::ones({3, 4})), "outside of the module that was parallelized",
                   "TESSERA_MODULE(Net)");
  });
  run_ranks(2, [](Rank& me) {
    PlainDropoutRoot model(true);
    parallelize_module(*model, me.mesh("tp=2"), {{"block.up", ColwiseParallel()}, {"block.down", RowwiseParallel()}});
    EXPECT_ERROR(UsageError, model->forward(torch::ones({3, 4})), "outside of the module that was parallelized");
  });
}

// A style is not needed to know the mesh of an nn::Dropout. Its input is compared too.
TEST(TrustDropout, AModuleOnAShardWithoutHistoryUnderARootWithoutAHolderThrows) {
  run_ranks(2, [](Rank& me) {
    const torch::NoGradGuard no_grad;
    Dropouts model(DropoutKind::Module);
    fill_same(model);
    parallelize_module(model, me.mesh("tp=2"), {{"up", ColwiseParallel()}});
    const auto shard = model->up(torch::ones({3, 4}));
    EXPECT_ERROR(UsageError, model->drop2(shard), "nn::Dropout", "differ between the ranks");
    EXPECT_TRUE(model->drop2(torch::ones({3, 4})).defined());
  });
}

// A compiled step cannot compare values.
TEST(TrustDropout, AShardOfFrozenParametersInACompiledStepThrows) {
  run_ranks(2, [](Rank& me) {
    Dropouts model(DropoutKind::Function);
    fill_same(model);
    parallelize_module(model, me.mesh("tp=2"), {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
    const auto x = torch::ones({3, 4});
    {
      const torch::NoGradGuard no_grad;  // a shard without history before the trace does not matter
      model->up(x);
    }
    auto step = compile([](Dropouts& net, const torch::Tensor& t) {
      auto loss = net(t).sum();
      loss.backward();
      return loss;
    });
    EXPECT_TRUE(step(model, x).defined());
    for (auto& p : model->up->parameters()) p.set_requires_grad(false);
    for (auto& p : model->embed->parameters()) p.set_requires_grad(false);
    EXPECT_ERROR(UsageError, step(model, x), "torch::dropout", "a compiled step cannot compare");
  });
}

// Layers of a recurrent network have dropout between them.
struct RecurrentImpl : torch::nn::Module {
  explicit RecurrentImpl(bool gru) : is_gru(gru) {
    up = register_module("up", nn::Linear(4, 6));
    down = register_module("down", nn::Linear(6, 4));
    if (gru)
      this->gru = register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(4, 4).num_layers(3).dropout(0.5)));
    else
      lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(4, 4).num_layers(3).dropout(0.5)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto run = [&](const torch::Tensor& t) { return is_gru ? std::get<0>(gru(t)) : std::get<0>(lstm(t)); };
    return run(run(x) + down(up(x).relu()));
  }
  bool is_gru;
  nn::Linear up{nullptr}, down{nullptr};
  torch::nn::GRU gru{nullptr};
  torch::nn::LSTM lstm{nullptr};
};
TESSERA_MODULE(Recurrent);

TEST(TrustDropout, RecurrentNetworksDrawTheSame) {
  for (const bool gru : {false, true})
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      SCOPED_TRACE(c10::str(gru ? "gru " : "lstm ", dtype));
      const auto run = [&](int64_t n) {
        std::vector<Tensors> each(static_cast<size_t>(n));
        run_ranks(n, [&](Rank& me) {
          torch::manual_seed(me.rank);
          Recurrent model(gru);
          fill_same(model);
          model->to(dtype);
          parallelize_module(model, me.mesh("tp=" + std::to_string(n)),
                             {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
          manual_seed(7);
          const auto y = model(torch::ones({2, 3, 4}, dtype));
          y.sum().backward();
          each[me.rank] = {y.detach(), DTensor(model->up->weight.grad()).full_tensor().detach()};
        });
        return each;
      };
      const auto expected = run(1)[0];
      for (const auto& found : run(2)) EXPECT_EQ(close(found, expected), "");
    }
}

// Other models of the process are not affected.
TEST(TrustDropout, AModelThatIsNotParallelizedUsesLibTorch) {
  run_dropouts(2, DropoutKind::Function);  // installs the kernels
  Dropouts plain(DropoutKind::Function);
  const auto before = random::state().offset;
  torch::manual_seed(5);
  const auto y = plain(torch::ones({3, 4}));
  torch::manual_seed(5);
  EXPECT_TRUE(torch::equal(plain(torch::ones({3, 4})), y));
  EXPECT_EQ(random::state().offset, before);
}

}  // namespace
}  // namespace tessera
