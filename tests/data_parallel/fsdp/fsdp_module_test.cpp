// The methods of FSDPModule and the options of fully_shard.
#include "tessera/data_parallel/fsdp/fsdp_module.h"

#include "tessera/debug/comm_debug_mode.h"
#include "tessera/nn/detail/module_list.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/fsdp.h"

namespace tessera {
namespace {

using namespace fixtures;
using comm::CommKind;
using comm::Family;

// Records the groups of all-gathers, in order.
struct Gathers : comm::Observer {
  std::vector<std::string> groups;
  void on_post(const comm::Record& record) override {
    if (record.kind == CommKind::AllGatherIntoTensor) groups.push_back(record.group);
  }
};

TEST(FSDPModule, ReshardsToFewerRanksAfterForward) {
  const MLPStacked start(2);
  const auto data = batches(4);
  for (const int64_t ranks : {1, 2, 4})
    run_ranks(4, [&](Rank& me) {
      auto plain = clone(start), model = clone(start);
      shard_blocks(model, {.mesh = me.mesh("dp=4"), .reshard_after_forward = ranks});
      optim::SGD plain_opt(plain->parameters(), {.lr = 0.1}), opt(model->parameters(), {.lr = 0.1});
      for (int step = 0; step < 2; step++) {
        plain_opt.zero_grad();
        opt.zero_grad();
        Gathers gathers;
        const comm::ObserverScope observe(&gathers);
        stack_loss(model, data[static_cast<size_t>(me.rank)]).backward();
        const char* again = ranks == 4 ? "dp" : me.rank < 2 ? "ranks 0,1" : "ranks 2,3";
        EXPECT_EQ(gathers.groups, ranks == 1 ? (std::vector<std::string>{"dp", "dp"})
                                             : (std::vector<std::string>{"dp", "dp", again, again}));
        accumulate_means(plain, data, stack_loss);
        expect_sharded(*model);
        expect_gradients(*model, *plain);
        plain_opt.step();
        opt.step();
      }
      if (ranks == 1) return;
      // A write between forward and backward: the shard that forward kept is out of date.
      const auto loss = stack_loss(model, data[0]);
      const torch::NoGradGuard no_grad;
      expect_sharded(*model->layers[0]);
      opt.step();
      plain_opt.step();
      EXPECT_EQ(close(model(data[0]), plain(data[0])), "");
    });
  run_ranks(4, [](Rank& me) {
    MLP model(models::mlp_module());
    EXPECT_ERROR(UsageError, fully_shard(model, {.mesh = me.mesh("dp=4"), .reshard_after_forward = 3}),
                 "reshard_after_forward = 3", "4 ranks");
    EXPECT_FALSE(is_dtensor(model->layers[0]->weight));
  });
}

TEST(FSDPModule, UnshardAndReshard) {
  const MLPStacked start(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    shard_blocks(model, {.mesh = me.mesh("dp=2")});
    auto layer = fsdp_module(*model->layers[1]);
    for (const bool async_op : {false, true}) {
      CommDebugMode comm;
      auto handle = layer.unshard(async_op);
      EXPECT_EQ(is_dtensor(model->layers[1]->layers[0]->weight), async_op);
      handle.wait();
      EXPECT_TRUE(is_dtensor(model->layers[0]->layers[0]->weight));
      EXPECT_TRUE(torch::equal(model->layers[1]->layers[0]->weight, start->parameters()[4]));
      model(torch::ones({1, 10}));
      EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllGatherIntoTensor, Family::C10d), 2);
      layer.unshard();
      layer.reshard();
      expect_sharded(*model->layers[1]);
    }
    MLP other(models::mlp_module());
    EXPECT_ERROR(UsageError, fsdp_module(*other), "MLP was not given to fully_shard");
  });
}

TEST(FSDPModule, KeepsTheBufferBetweenSteps) {
  const MLPStacked start(2);
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    shard_blocks(model, {.mesh = me.mesh("dp=2")});
    auto fsdp = fsdp_module(*model);
    optim::SGD plain_opt(plain->parameters(), {.lr = 0.1}), opt(model->parameters(), {.lr = 0.1});
    const auto pass = [&] {
      CommDebugMode comm;
      stack_loss(model, data[static_cast<size_t>(me.rank)]).backward();
      accumulate_means(plain, data, stack_loss);
      expect_sharded(*model);
      expect_gradients(*model, *plain);
      return comm.get_comm_counts().of(CommKind::AllGatherIntoTensor, Family::C10d);
    };
    EXPECT_EQ(pass(), 4);
    fsdp.set_reshard_after_backward(false);
    EXPECT_EQ(pass(), 4);
    EXPECT_EQ(pass(), 2) << "forward reused the buffers and then freed them";
    fsdp.set_reshard_after_forward(false);
    EXPECT_EQ(pass(), 0);
    opt.step();
    plain_opt.step();
    EXPECT_EQ(pass(), 2) << "the shards have changed";
    fsdp.set_reshard_after_backward(true);
    EXPECT_EQ(pass(), 0);
    EXPECT_EQ(pass(), 2);
  });
}

TEST(FSDPModule, EvaluationDoesNotAllGatherAgain) {
  const MLPStacked start(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    shard_blocks(model, {.mesh = me.mesh("dp=2")});
    fsdp_module(*model).set_reshard_after_forward(false);
    const torch::NoGradGuard no_grad;
    const auto gathers = [&] {
      CommDebugMode comm;
      model(torch::ones({1, 10}));
      expect_sharded(*model);
      return comm.get_comm_counts().of(CommKind::AllGatherIntoTensor, Family::C10d);
    };
    EXPECT_EQ(gathers(), 2);
    EXPECT_EQ(gathers(), 0);
    fsdp_module(*model).set_reshard_after_forward(true);
    EXPECT_EQ(gathers(), 0);
    EXPECT_EQ(gathers(), 2);
  });
}

TEST(FSDPModule, OnlyTheLastBackwardWaits) {
  const MLPStacked start(3);
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    shard_blocks(model, {.mesh = me.mesh("dp=2")});
    auto fsdp = fsdp_module(*model);
    fsdp.set_is_last_backward(false);
    stack_loss(model, data[static_cast<size_t>(me.rank)]).backward();
    EXPECT_FALSE(model->layers[0]->layers[0]->weight.grad().defined()) << "the reduction is in flight";
    stack_loss(model, data[static_cast<size_t>(me.rank)]).backward();
    fsdp.set_is_last_backward(true);
    stack_loss(model, data[static_cast<size_t>(me.rank)]).backward();
    for (int i = 0; i < 3; i++) accumulate_means(plain, data, stack_loss);
    expect_gradients(*model, *plain);
  });
}

TEST(FSDPModule, SetGradientDivideFactor) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    MLP plain(models::mlp_module()), model(models::mlp_module());
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    fsdp_module(*model).set_gradient_divide_factor(5);
    square_loss(model, data[static_cast<size_t>(me.rank)]).backward();
    for (const auto& x : data) (square_loss(plain, x) / 5).backward();
    expect_gradients(*model, *plain);
    EXPECT_ERROR(UsageError, fsdp_module(*model).set_gradient_divide_factor(0), "above 0");
  });
}

struct EmbedImpl : torch::nn::Cloneable<EmbedImpl> {
  EmbedImpl() { reset(); }
  void reset() override {
    embed = register_module("embed", nn::Embedding(7, 10));
    mlp = register_module("mlp", MLP(models::mlp_module()));
  }
  at::Tensor encode(const at::Tensor& tokens, double scale) { return mlp(embed(tokens)) * scale; }
  at::Tensor forward(at::Tensor tokens) { return mlp(embed(tokens)); }
  nn::Embedding embed{nullptr};
  MLP mlp{nullptr};
};
TESSERA_MODULE(Embed);

TEST(FSDPModule, AnEmbeddingIsNotUnshardedInBackward) {
  torch::manual_seed(2);
  const Embed start;
  const auto tokens = torch::arange(6).view({2, 3});
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    for (Module* part : {static_cast<Module*>(model->embed.get()), static_cast<Module*>(model->mlp.get())})
      fully_shard(*part, {.mesh = me.mesh("dp=2")});
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    fsdp_module(*model->embed).set_unshard_in_backward(false);
    const auto loss = [](Embed& m, const at::Tensor& x) { return m(x).pow(2).mean(); };
    for (int i = 0; i < 2; i++) {
      const auto value = loss(model, tokens[me.rank]);
      CommDebugMode comm;
      value.backward();
      EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllGatherIntoTensor, Family::C10d), 1);
      accumulate_means(plain, {tokens[0], tokens[1]}, loss);
      expect_gradients(*model, *plain);
    }
  });
}

TEST(FSDPModule, MethodsOtherThanForward) {
  torch::manual_seed(2);
  const Embed start;
  const auto tokens = torch::arange(6).view({2, 3});
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    auto encode = register_fsdp_forward_method(model, &EmbedImpl::encode);
    auto plain_encode = register_fsdp_forward_method(plain, &EmbedImpl::encode);  // a plain call
    for (int i = 0; i < 2; i++) {
      encode(tokens[me.rank], 2.0).pow(2).mean().backward();
      expect_sharded(*model);
      accumulate_means(plain, {tokens[0], tokens[1]},
                       [&](Embed&, const at::Tensor& x) { return plain_encode(x, 2.0).pow(2).mean(); });
      expect_gradients(*model, *plain);
    }
  });
}

TEST(FSDPModule, AListOfModulesIsOneGroup) {
  const MLPStacked start(3);
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    const FullyShardOptions options{.mesh = me.mesh("dp=2")};
    fully_shard({model->layers[0].ptr(), model->layers[2].ptr()}, options);
    fully_shard(model->layers[1], options);
    fully_shard(model, options);
    for (int i = 0; i < 2; i++) {
      CommDebugMode comm;
      stack_loss(model, data[static_cast<size_t>(me.rank)]).backward();
      EXPECT_EQ(comm.get_comm_counts().of(CommKind::ReduceScatterTensor, Family::C10d), 2);
      EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllGatherIntoTensor, Family::C10d), 4);
      accumulate_means(plain, data, stack_loss);
      expect_sharded(*model);
      expect_gradients(*model, *plain);
    }
    // Runs one of the modules after the model.
    zero_grad(*model);
    zero_grad(*plain);
    const auto part = [](MLPStacked& m, const at::Tensor& x) { return (m(x) + m->layers[2](x)).pow(2).mean(); };
    part(model, data[static_cast<size_t>(me.rank)]).backward();
    accumulate_means(plain, data, part);
    expect_sharded(*model);
    expect_gradients(*model, *plain);
  });
}

TEST(FSDPModule, Errors) {
  run_ranks(2, [](Rank& me) {
    const FullyShardOptions options{.mesh = me.mesh("dp=2")};
    MLPStacked model(2);
    EXPECT_ERROR(UsageError, fully_shard(model->layers, options), "ModuleList", "for each module in it");
    nn::ModuleDict<MLP> dict(std::vector<std::pair<std::string, MLP>>{{"a", MLP(models::mlp_module())}});
    EXPECT_ERROR(UsageError, fully_shard(dict, options), "ModuleDict");
    EXPECT_ERROR(UsageError, fully_shard(std::vector<std::shared_ptr<Module>>{}, options), "no modules");
    EXPECT_ERROR(UsageError, fully_shard({model->layers[0].ptr(), model->layers[0].ptr()}, options), "twice");
    EXPECT_ERROR(UsageError, fully_shard(model, {.mesh = me.mesh("a=1,b=1,c=2")}), "3 axes");
    model->layers[0]->register_parameter("one", torch::ones({}));
    EXPECT_ERROR(UsageError, fully_shard(model, options), "layers.0.one", "is a scalar");
    fully_shard(model->layers[1], options);
    EXPECT_ERROR(UsageError, fully_shard(model->layers[1], options), "MLP is sharded already");
    MLP outer(models::mlp_module());
    fully_shard(outer, options);
    EXPECT_ERROR(UsageError, fully_shard(outer->layers[1], options), "weight is sharded already, as part of MLP",
                 "inner modules before outer ones");
    MLP mixed(models::mlp_module());
    mixed->layers[1]->to(torch::kDouble);
    EXPECT_ERROR(UsageError, fully_shard(mixed, options), "net2.weight is Double", "net1.weight is Float");
    EXPECT_FALSE(is_dtensor(mixed->layers[0]->weight));
    MLP dims(models::mlp_module());
    EXPECT_ERROR(
        UsageError,
        fully_shard(dims, {.mesh = me.mesh("dp=2"), .shard_placement_fn = [](const at::Tensor&) { return 1; }}),
        "net1.bias", "no dim 1");
  });
}

TEST(FSDPModule, IgnoredParametersAreNotSharded) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    MLP model(models::mlp_module());
    auto& kept = model->layers[0]->weight;
    fully_shard(model, {.mesh = me.mesh("dp=2"), .ignored_params = {kept}});
    square_loss(model, data[static_cast<size_t>(me.rank)]).backward();
    EXPECT_FALSE(is_dtensor(kept));
    EXPECT_FALSE(is_dtensor(kept.grad()));
    EXPECT_TRUE(is_dtensor(model->layers[1]->weight.grad()));
  });
}

TEST(FSDPModule, CastsInputsAndOutputs) {
  const MLPStacked start(2);
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    const auto half = at::kBFloat16;
    shard_blocks(model, {.mesh = me.mesh("dp=2"),
                         .mp_policy = {.param_dtype = half, .reduce_dtype = at::kFloat, .output_dtype = at::kFloat}});
    auto log = std::make_shared<std::vector<at::ScalarType>>();
    model->layers[1]->layers[0].register_forward_pre_hook(
        [log](Module&, const Tensors& in) { log->push_back(in[0].scalar_type()); });
    // Two forwards, so that gradients of two graphs are accumulated and reduced during backward.
    const auto loss = [](MLPStacked& m, const at::Tensor& x) { return stack_loss(m, x) + stack_loss(m, x * 2); };
    CommDebugMode comm;
    const auto value = loss(model, data[static_cast<size_t>(me.rank)]);
    EXPECT_EQ(value.scalar_type(), at::kFloat);
    value.backward();
    EXPECT_EQ(*log, (std::vector{half, half}));
    EXPECT_EQ(comm.get_comm_counts().of(CommKind::ReduceScatterTensor, Family::C10d), 2);
    accumulate_means(plain, data, loss);
    expect_gradients(*model, *plain, {0.05, 2e-2});
    // Without the cast, a float input and half weights do not match.
    MLP strict(models::mlp_module());
    fully_shard(strict, {.mesh = me.mesh("dp=2"), .mp_policy = {.param_dtype = half, .cast_forward_inputs = false}});
    EXPECT_THROW(strict(data[0]), c10::Error);
    expect_sharded(*strict);
  });
}

TEST(FSDPModule, OffloadedShardsDoNotShareMemoryWithUnshardedParameters) {
  const auto data = batches(2);
  for (const int64_t ranks : {1, 2})
    run_ranks(ranks, [&](Rank& me) {
      MLP plain(models::mlp_module()), model(models::mlp_module());
      fully_shard(model, {.mesh = me.mesh(c10::str("dp=", ranks)), .offload_policy = CPUOffloadPolicy()});
      const auto memory = [](const at::Tensor& t) {
        return (is_dtensor(t) ? DTensor(t).to_local() : t).storage().data();
      };
      const auto shard = memory(model->layers[0]->weight.detach());
      auto handle = fsdp_module(*model).unshard();
      EXPECT_NE(memory(model->layers[0]->weight.detach()), shard);
      square_loss(model, data[static_cast<size_t>(me.rank)]).backward();
      EXPECT_EQ(memory(model->layers[0]->weight.detach()), shard);
      accumulate_means(plain, Tensors(data.begin(), data.begin() + ranks), square_loss);
      expect_gradients(*model, *plain);
    });
}

}  // namespace
}  // namespace tessera
