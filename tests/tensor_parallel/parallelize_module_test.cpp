#include "tessera/tensor_parallel/parallelize_module.h"

#include "fixtures/transformers.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/models/mlp.h"
#include "tessera/nn/attention_heads.h"
#include "tessera/tensor_parallel/detail/module_plan.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using comm::CommKind;
using testing::close;
using testing::Rank;
using testing::run_ranks;

const Plan kPair{{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}};

torch::Tensor full(const torch::Tensor& t) { return is_dtensor(t) ? DTensor(t).full_tensor() : t; }

// Expects the outputs and the gradients of all parameters of the plain model.
template <class H>
void expect_like_plain(const H& plain, H& model, const torch::Tensor& data) {
  auto x = data.clone(), y = data.clone();
  if (data.is_floating_point()) x.requires_grad_(), y.requires_grad_();
  const auto expected = plain(x);
  const auto weights = torch::linspace(-1, 2, expected.numel()).view_as(expected);  // equal on all ranks
  const auto grads = torch::autograd::grad({(expected * weights).sum()}, plain->parameters());
  const auto out = full(model(y));
  ASSERT_EQ(close(out, expected), "");
  (out * weights).sum().backward();
  const auto names = plain->named_parameters().keys();
  for (size_t i = 0; i < names.size(); i++)
    EXPECT_EQ(close(full(get_parameter(*model, names[i]).grad()), grads[i]), "") << names[i];
  model->zero_grad();
}

template <class H>
void expect_unchanged(H& model) {
  for (const auto& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
  EXPECT_EQ(hook_point(*model).hooks(), nullptr);
}

TEST(ParallelizeModule, UnevenFeaturesHaveTheSameGradients) {
  const models::MLP plain(models::MLPConfig{{{"net1", 5, 10, models::Activation::Relu}, {"net2", 10, 3}}});
  const auto data = torch::randn({4, 5});
  for (int64_t n : {1, 2, 3, 4}) {
    run_ranks(n, [&](Rank& me) {
      auto model = clone(plain);
      parallelize_module(model, me.mesh("tp=" + std::to_string(n)), kPair);
      CommDebugMode comm;
      expect_like_plain(plain, model, data);
      EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllReduce),
                n == 1 ? 0 : 2);  // net2's output, the gradient of the input
      // 10 features over 4 ranks: 3 3 3 1
      EXPECT_EQ(DTensor(get_parameter(*model, "net1.weight").detach()).to_local().size(0),
                n == 4   ? (me.rank < 3 ? 3 : 1)
                : n == 3 ? (me.rank < 2 ? 4 : 2)
                         : 10 / n);
    });
  }
}

// The tensor-parallel part of DDP x TP: each dp rank has its own input, and communication is along tp only.
TEST(ParallelizeModule, CommunicatesOnlyAlongItsAxis) {
  const models::MLP plain(models::mlp_module());
  const auto data = torch::randn({2, 4, 10});
  run_ranks(4, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    auto model = clone(plain);
    const auto count = [](const CommDebugMode& comm, CommKind kind) {
      return comm.get_comm_counts().of(kind) + comm.get_comm_counts().of(kind, comm::Family::C10d);
    };
    CommDebugMode comm;
    parallelize_module(model, mesh["tp"], kPair);
    EXPECT_EQ(count(comm, CommKind::Scatter), 3);
    EXPECT_EQ(count(comm, CommKind::Broadcast), 1);
    comm.reset();
    const auto y = model(data[me.rank / 2]);
    y.sum().backward();
    EXPECT_EQ(count(comm, CommKind::AllReduce), 1);  // net2's output; the input needs no gradient
    EXPECT_EQ(comm.get_total_counts(), 1);
    for (const auto& [axis, bytes] : comm.get_bytes_by_axis()) EXPECT_EQ(axis, "tp") << bytes;
    EXPECT_EQ(close(y, plain(data[me.rank / 2])), "");
  });
}

TEST(ParallelizeModule, AModuleCalledTwiceInOneForwardHasTheSameGradients) {
  struct TwiceImpl : torch::nn::Cloneable<TwiceImpl> {
    TwiceImpl() { reset(); }
    void reset() override { mlp = register_module("mlp", models::MLP(models::mlp_module())); }
    torch::Tensor forward(const torch::Tensor& x) { return mlp(torch::tanh(mlp(x))); }
    models::MLP mlp{nullptr};
  };
  const Holder<TwiceImpl> plain(std::make_shared<Hooked<TwiceImpl>>());
  const auto data = torch::randn({4, 10});
  run_ranks(2, [&](Rank& me) {
    auto model = clone(plain);
    parallelize_module(model, me.mesh("tp=2"), {{"mlp.net1", ColwiseParallel()}, {"mlp.net2", RowwiseParallel()}});
    expect_like_plain(plain, model, data);
  });
}

// Attention with q, k and v in one Linear or in three. It infers the number of heads from the width.
struct AttentionImpl : torch::nn::Cloneable<AttentionImpl>, AttentionHeads {
  explicit AttentionImpl(int64_t heads, bool fused) : heads(heads), fused(fused) { reset(); }
  void reset() override { linears = fixtures::AttentionLinears(*this, heads * 4, fused); }
  int64_t head_dim() const override { return 4; }
  torch::Tensor forward(const torch::Tensor& x) {
    auto split = [&](const torch::Tensor& t) { return t.view({x.size(0), x.size(1), -1, 4}).transpose(1, 2); };
    torch::Tensor q, k, v;
    if (fused) {
      const auto parts = linears.qkv(x).view({x.size(0), x.size(1), 3, -1});
      q = split(parts.select(2, 0)), k = split(parts.select(2, 1)), v = split(parts.select(2, 2));
    } else {
      q = split(linears.wq(x)), k = split(linears.wk(x)), v = split(linears.wv(x));
    }
    const auto y = torch::softmax(torch::matmul(q, k.transpose(-1, -2)), -1).matmul(v);
    return linears.wo(y.transpose(1, 2).flatten(2));
  }
  int64_t heads;
  bool fused;
  fixtures::AttentionLinears linears;
};
TESSERA_MODULE(Attention);

TEST(ParallelizeModule, FusedQkvIsShardedPerSection) {
  const Attention plain(4, true);
  const auto data = torch::randn({2, 3, 16});
  for (int64_t n : {1, 2, 4}) {
    run_ranks(n, [&](Rank& me) {
      auto model = clone(plain);
      parallelize_module(model, me.mesh("tp=" + std::to_string(n)),
                         {{"qkv", ColwiseParallel{.sections = 3}}, {"wo", RowwiseParallel()}});
      CommDebugMode comm;
      expect_like_plain(plain, model, data);
      EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllReduce), n == 1 ? 0 : 2);
    });
  }
}

TEST(ParallelizeModule, SixHeadsOverFourRanksNeedABlockPerHead) {
  const Attention plain(6, false);
  const auto data = torch::randn({2, 3, 24});
  run_ranks(4, [&](Rank& me) {
    auto model = clone(plain);
    const auto mesh = me.mesh("tp=4");
    const Plan splits_a_head{{"w[qkv]", ColwiseParallel()}, {"wo", RowwiseParallel()}};
    EXPECT_ERROR(UsageError, parallelize_module(model, mesh, splits_a_head), "'wq' has 6 heads of 4 features",
                 "4 ranks would split a head", "1, 2, 3, 6", "block=4");
    expect_unchanged(model);
    parallelize_module(model, mesh, {{"w[qkv]", ColwiseParallel{.block = 4}}, {"wo", RowwiseParallel{.block = 4}}});
    EXPECT_EQ(DTensor(model->linears.wq->weight.detach()).to_local().size(0), me.rank < 3 ? 8 : 0);
    expect_like_plain(plain, model, data);
  });
}

// A vocabulary that is not divisible by the number of ranks; embedding and output share a weight.
struct TiedImpl : torch::nn::Cloneable<TiedImpl> {
  TiedImpl() { reset(); }
  void reset() override {
    embed = register_module("embed", nn::Embedding(7, 4));
    norm = register_module("norm", nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    const auto x = norm(embed(tokens));
    return torch::matmul(x, embed->weight.t());
  }
  nn::Embedding embed{nullptr};
  nn::LayerNorm norm{nullptr};
};
TESSERA_MODULE(Tied);

TEST(ParallelizeModule, TiedWeightsHaveTheSameGradients) {
  const Tied plain;
  const auto tokens = torch::randint(0, 7, {2, 5});
  for (int64_t n : {2, 4}) {
    run_ranks(n, [&](Rank& me) {
      auto model = clone(plain);
      parallelize_module(
          model, me.mesh("tp=" + std::to_string(n)),
          {{"embed",
            RowwiseParallel{.input_layouts = Replicate(), .output_layouts = Shard(1), .use_local_output = false}},
           {"norm", SequenceParallel()}});
      expect_like_plain(plain, model, tokens);  // 5 positions over 2 and 4 ranks
    });
  }
}

struct WithDropoutImpl : torch::nn::Cloneable<WithDropoutImpl> {
  WithDropoutImpl() { reset(); }
  void reset() override {
    net1 = register_module("net1", nn::Linear(4, 8));
    between = register_module("between", nn::Dropout(0.5));
    net2 = register_module("net2", nn::Linear(8, 4));
    after = register_module("after", nn::Dropout(0.5));
  }
  torch::Tensor forward(const torch::Tensor& x) { return after(net2(between(net1(x)))); }
  nn::Linear net1{nullptr}, net2{nullptr};
  nn::Dropout between{nullptr}, after{nullptr};
};
TESSERA_MODULE(WithDropout);

TEST(ParallelizeModule, ADropoutBetweenColwiseAndRowwiseNeedsAPlanEntry) {
  const WithDropout plain;
  const auto data = torch::ones({3, 4});
  const Style sharded = PrepareModuleInputOutput{.input_layouts = Shard(-1),
                                                 .desired_input_layouts = Shard(-1),
                                                 .output_layouts = Shard(-1),
                                                 .desired_output_layouts = Shard(-1)};
  std::vector<torch::Tensor> outputs(3);
  for (int64_t n : {1, 2, 3}) {
    std::vector<torch::Tensor> each(n);
    run_ranks(n, [&](Rank& me) {
      auto model = clone(plain);
      const auto mesh = me.mesh("tp=" + std::to_string(n));
      EXPECT_ERROR(UsageError, parallelize_module(model, mesh, kPair), "'between', a Dropout", "'net1'", "'net2'");
      expect_unchanged(model);
      parallelize_module(model, mesh, {kPair[0], kPair[1], {"between", sharded}});
      manual_seed(3);
      each[me.rank] = model(data).detach();
    });
    for (const auto& y : each) EXPECT_TRUE(torch::equal(y, each[0]));  // `after` drops the same elements on all ranks
    outputs[n - 1] = each[0];
  }
  // The masks use global indices, so they do not depend on the number of ranks.
  for (const auto& y : outputs) EXPECT_EQ(close(y, outputs[0]), "");
  EXPECT_GT((outputs[0] == 0).sum().item<int64_t>(), 0);
}

struct PlainMembersImpl : torch::nn::Module {
  PlainMembersImpl() {
    up = register_module("up", torch::nn::Linear(4, 6));
    down = register_module("down", torch::nn::Linear(6, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::relu(up(x)); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(PlainMembers);

// Without a hook only a style that returns the DTensor of the sharded weight can hold. Others are refused at once.
TEST(ParallelizeModule, TypedTorchMembersCannotHaveHooks) {
  PlainMembers plain;
  const auto data = torch::randn({3, 4});
  const auto expected = plain(data);
  run_ranks(2, [&](Rank& me) {
    PlainMembers model;
    {
      torch::NoGradGuard no_grad;
      for (auto& item : model->named_parameters()) item->copy_(plain->named_parameters()[item.key()]);
    }
    const auto mesh = me.mesh("tp=2");
    EXPECT_ERROR(UsageError, parallelize_module(*model, mesh, {{"down", RowwiseParallel()}}), "'down'",
                 "tessera::nn::Linear instead of torch::nn::Linear");
    for (const auto& style : {ColwiseParallel(), ColwiseParallel{.input_layouts = Shard(0), .use_local_output = false},
                              ColwiseParallel{.output_layouts = Replicate(), .use_local_output = false},
                              ColwiseParallel{.output_layouts = Shard(0), .use_local_output = false}})
      EXPECT_ERROR(UsageError, parallelize_module(*model, mesh, {{"up", style}}), "'up', a Linear",
                   "cannot have a hook", "tessera::nn::Linear instead of torch::nn::Linear",
                   "use_local_output = false");
    EXPECT_ERROR(UsageError, parallelize_module(*model->up, mesh, ColwiseParallel()), "tessera::nn::Linear");
    for (const auto& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
    parallelize_module(*model, mesh, {{"up", ColwiseParallel{.use_local_output = false}}});
    const DTensor y = model(data);
    EXPECT_EQ(y.placements()[0], Shard(1));
    EXPECT_EQ(close(y.full_tensor(), expected), "");
  });
}

TEST(ParallelizeModule, TorchChildrenOfASequentialGetHooks) {
  torch::nn::Sequential plain(torch::nn::Linear(4, 6), torch::nn::ReLU(), torch::nn::Linear(6, 4));
  const auto data = torch::randn({3, 4});
  const auto expected = plain->forward(data);
  run_ranks(2, [&](Rank& me) {
    torch::nn::Sequential model(torch::nn::Linear(4, 6), torch::nn::ReLU(), torch::nn::Linear(6, 4));
    {
      torch::NoGradGuard no_grad;
      for (auto& item : model->named_parameters()) item->copy_(plain->named_parameters()[item.key()]);
    }
    parallelize_module(*model, me.mesh("tp=2"), {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
    EXPECT_EQ(close(model->forward(data), expected), "");
  });
}

TEST(ParallelizeModule, InvalidPlansThrowAndChangeNothing) {
  run_ranks(2, [](Rank& me) {
    models::MLP model(models::mlp_module());
    const auto mesh = me.mesh("tp=2");
    const auto expect_error = [&](const Plan& plan, std::initializer_list<std::string> parts) {
      const auto said = testing::error_message<UsageError>([&] { parallelize_module(model, mesh, plan); });
      for (const auto& part : parts) EXPECT_CONTAINS(said, part);
      expect_unchanged(model);
    };
    expect_error({{"net1", ColwiseParallel()}, {"net3", RowwiseParallel()}}, {"net3", "net1"});
    expect_error({{"net1", ColwiseParallel()}, {"net*", RowwiseParallel()}}, {"net1", "net*"});
    expect_error({{"", ColwiseParallel()}}, {"MLP", "supports Linear and Embedding"});
    expect_error({{"net1", ColwiseParallel{.sections = 3}}}, {"'net1'", "16 features are not 3 equal sections"});
    expect_error({{"net1", ColwiseParallel{.sections = {4, 12}}}}, {"different sizes"});
    EXPECT_ERROR(UsageError, parallelize_module(model, me.mesh("a=2,b=1,c=1"), kPair), "needs a 1-D mesh",
                 "mesh[\"tp\"]");
    expect_unchanged(model);
    parallelize_module(model, mesh, kPair);
    EXPECT_ERROR(UsageError, parallelize_module(model, mesh, kPair), "'net1' is parallelized already",
                 "[16, 10][S(0)]");
  });
}

TEST(ParallelizeModule, InvalidInputsThrow) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    nn::Linear row(8, 4);
    parallelize_module(row, mesh, RowwiseParallel());
    EXPECT_ERROR(UsageError, row(torch::ones({3, 8})), "S(-1)", "4 of 8 features", "it has 8", "Replicate()",
                 "module Linear");
    EXPECT_ERROR(UsageError, row(torch::ones({3, 5})), "it has 5");
    nn::Identity two;
    parallelize_module(two, mesh, PrepareModuleInput{{Shard(0), Shard(0)}, {Replicate(), Replicate()}});
    EXPECT_ERROR(UsageError, two(torch::ones({2})), "module Identity", "has 2 input layouts", "has 1");
    const auto uneven = torch::ones({2, me.rank == 0 ? 3 : 2, 8});
    nn::Linear col(8, 4);
    parallelize_module(col, mesh, ColwiseParallel{.input_layouts = Shard(1)});
    for (auto call = 0; call < 2; call++)
      EXPECT_ERROR(UsageError, col(uneven), "the input in module Linear has the layout S(1)",
                   "equal sizes on all ranks", "'[2, 2, 8]'", "'[2, 3, 8]'", "pass a DTensor");
    nn::LayerNorm norm(torch::nn::LayerNormOptions({8}));
    parallelize_module(norm, mesh, SequenceParallel());
    EXPECT_ERROR(UsageError, norm(uneven), "the input in module LayerNorm has the layout S(1)");
    const auto other = me.mesh("other=2");
    EXPECT_ERROR(UsageError, row(DTensor::from_local(torch::ones({3, 4}), other, {Shard(1)})), "other");
  });
}

TEST(ParallelizeModule, ACloneIsParallelizedToo) {
  const models::MLP plain(models::mlp_module());
  const auto data = torch::randn({4, 10});
  run_ranks(2, [&](Rank& me) {
    auto model = clone(plain);
    parallelize_module(model, me.mesh("tp=2"), kPair);
    auto copy = clone(model);
    EXPECT_EQ(DTensor(get_parameter(*copy, "net1.weight")).placements()[0], Shard(0));
    expect_like_plain(plain, copy, data);
  });
}

TEST(ModulePlan, PrintsPlacementsAndLocalSizes) {
  run_ranks(2, [](Rank& me) {
    models::MLP model(models::mlp_module());
    const auto plans = resolve_plan(*model, me.mesh("tp=2"), kPair);
    ASSERT_EQ(plans.size(), 2u);
    EXPECT_EQ(c10::str(plans[0]), "net1  Linear  colwise  weight [16, 10] -> S(0) [8, 10]  bias [16] -> S(0) [8]");
    EXPECT_EQ(plans[1].parameters[0].local_bytes, 10 * 8 * 4);
    EXPECT_EQ(plans[1].parameters[1].placement, Replicate());
    expect_unchanged(model);
  });
}

TEST(ParallelizeModule, DifferentPlansOnRanksThrow) {
  run_ranks(2, [](Rank& me) {
    models::MLP model(models::mlp_module());
    const Plan other{{"net1", RowwiseParallel()}};
    EXPECT_ERROR(UsageError, parallelize_module(*model, me.mesh("tp=2"), me.rank == 0 ? kPair : other),
                 "parallelize_module: the ranks of group 'tp' differ", "Rank 1 has 'net1 Linear rowwise'",
                 "the first rank has 'net1 Linear colwise'");
    for (const auto& p : model->parameters()) EXPECT_FALSE(is_dtensor(p)) << "nothing was changed";
  });
}

}  // namespace
}  // namespace tessera
