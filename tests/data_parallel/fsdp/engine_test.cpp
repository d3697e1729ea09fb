// fully_shard in steps other than one forward and one backward of the entire model.
#include "tessera/comm/detail/records.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/random.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/nn/checkpoint_wrapper.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/detail/counting_allocator.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/fsdp.h"

namespace tessera {
namespace {

using namespace fixtures;
using comm::CommKind;
using comm::Family;

int64_t reductions(const CommDebugMode& comm) {
  return comm.get_comm_counts().of(CommKind::ReduceScatterTensor, Family::C10d);
}

// Runs `step` on each rank with its batch, and on a plain module with all batches, and compares gradients.
template <class Step>
void expect_same_as_plain(
    const MLPStacked& start, int64_t ranks, const FullyShardOptions& options, Step step,
    const std::function<void(MLPStacked&)>& prepare = [](MLPStacked&) {}) {
  const auto data = batches(ranks);
  run_ranks(ranks, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    prepare(plain);
    prepare(model);
    auto mine = options;
    mine.mesh = me.mesh(c10::str("dp=", ranks));
    shard_blocks(model, mine);
    for (int i = 0; i < 2; i++) {
      zero_grad(*model);
      zero_grad(*plain);
      step(model, data[static_cast<size_t>(me.rank)]);
      accumulate_means(plain, data, [&](MLPStacked& m, const at::Tensor& x) {
        step(m, x);
        return torch::zeros({}, torch::requires_grad());
      });
      expect_sharded(*model);
      expect_gradients(*model, *plain);
    }
  });
}

// Two steps of a sharded model, with the gradients of the plain one. The second step accumulates.
template <class Model, class Loss>
void expect_two_steps(Rank& me, Model& model, Model& plain, const Tensors& data, int64_t expected_reductions,
                      Loss loss) {
  for (int i = 0; i < 2; i++) {
    CommDebugMode comm;
    loss(model, data[static_cast<size_t>(me.rank)]).backward();
    EXPECT_EQ(reductions(comm), expected_reductions);
    accumulate_means(plain, data, loss);
    expect_sharded(*model);
    expect_gradients(*model, *plain);
  }
}

TEST(FullyShardEngine, SeveralForwardsThenOneBackward) {
  for (const bool reshard : {true, false})
    expect_same_as_plain(MLPStacked(2), 2, {.reshard_after_forward = reshard}, [](MLPStacked& m, const at::Tensor& x) {
      (stack_loss(m, x) + stack_loss(m, x * 2)).backward();
    });
}

TEST(FullyShardEngine, TwoForwardsThenTwoBackwards) {
  expect_same_as_plain(MLPStacked(2), 3, {}, [](MLPStacked& m, const at::Tensor& x) {
    const auto first = stack_loss(m, x), second = stack_loss(m, x * 2);
    first.backward();
    second.backward();
  });
}

TEST(FullyShardEngine, BackwardTwiceThroughOneGraph) {
  expect_same_as_plain(MLPStacked(2), 2, {}, [](MLPStacked& m, const at::Tensor& x) {
    const auto loss = stack_loss(m, x);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  });
}

TEST(FullyShardEngine, ForwardUnderNoGradBetweenForwardAndBackward) {
  for (const bool reshard : {true, false})
    expect_same_as_plain(MLPStacked(2), 2, {.reshard_after_forward = reshard}, [](MLPStacked& m, const at::Tensor& x) {
      const auto loss = stack_loss(m, x);
      {
        const torch::NoGradGuard no_grad;
        m(x * 3);
      }
      loss.backward();
    });
}

// Runs submodules after the model.
TEST(FullyShardEngine, SubmodulesRunAfterTheModel) {
  expect_same_as_plain(MLPStacked(2), 2, {}, [](MLPStacked& m, const at::Tensor& x) {
    m->layers[0](m->layers[1](m(x))).pow(2).mean().backward();
  });
}

struct SharedBlockImpl : torch::nn::Cloneable<SharedBlockImpl> {
  SharedBlockImpl() { reset(); }
  void reset() override {
    a = register_module("a", MLP(models::mlp_module()));
    b = register_module("b", MLP(models::mlp_module()));
  }
  at::Tensor forward(at::Tensor x) { return a(b(a(x)) + b(x)); }
  MLP a{nullptr}, b{nullptr};
};
TESSERA_MODULE(SharedBlock);

TEST(FullyShardEngine, AModuleRunsTwiceInOneForward) {
  const SharedBlock start;
  const auto data = batches(2);
  const auto loss = [](SharedBlock& m, const at::Tensor& x) { return m(x).pow(2).mean(); };
  for (const bool reshard : {true, false})
    run_ranks(2, [&](Rank& me) {
      auto plain = clone(start), model = clone(start);
      const FullyShardOptions options{.mesh = me.mesh("dp=2"), .reshard_after_forward = reshard};
      fully_shard(model->a, options);
      fully_shard(model->b, options);
      fully_shard(model, options);
      expect_two_steps(me, model, plain, data, 2, loss);
    });
}

TEST(FullyShardEngine, FrozenParametersAndFrozenModules) {
  expect_same_as_plain(
      MLPStacked(3), 2, {}, [](MLPStacked& m, const at::Tensor& x) { stack_loss(m, x).backward(); },
      [](MLPStacked& m) {
        m->layers[1]->layers[0]->weight.requires_grad_(false);
        for (auto& p : m->layers[2]->parameters()) p.requires_grad_(false);
      });
}

// A mostly frozen model must not stay unsharded: a frozen group is resharded when the next one begins backward.
TEST(FullyShardEngine, FrozenGroupsAreResharded) {
  constexpr int64_t kWidth = 256, kLayers = 12;
  MLPStacked start(kLayers, models::MLPConfig{.layers = {{"net", kWidth, kWidth}}, .seed = 3});
  const auto x = torch::randn({1, kWidth}, torch::requires_grad());
  testing::CountingAllocator count;
  int64_t before = 0;
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    for (auto& p : model->parameters()) p.requires_grad_(false);
    shard_blocks(model, {.mesh = me.mesh("dp=2")});
    const auto mine = x.detach().clone().requires_grad_();
    me.group()->barrier().wait();
    if (me.rank == 0) before = count.live_bytes(), count.reset_peak();
    me.group()->barrier().wait();
    model(mine).sum().backward();
    expect_sharded(*model);
    EXPECT_TRUE(mine.grad().defined());
  });
  const int64_t unit = kWidth * kWidth * 4;
  EXPECT_LT(count.peak_bytes() - before, 2 * 4 * unit + (1 << 18)) << "on two ranks, two groups and their buffers";
}

TEST(FullyShardEngine, UnusedLayers) {
  const auto skip = [](MLPStacked& m, const at::Tensor& x) {  // skips layer 1
    m->layers[2](m->layers[0](x)).pow(2).mean().backward();
  };
  const MLPStacked start(3);
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    shard_blocks(model, {.mesh = me.mesh("dp=2")});
    const auto& mine = data[static_cast<size_t>(me.rank)];
    stack_loss(model, mine).backward();
    zero_grad(*model);
    skip(model, mine);
    for (const auto& x : data) (plain->layers[2](plain->layers[0](x)).pow(2).mean() / 2).backward();
    expect_sharded(*model);
    expect_gradients(*model, *plain);
  });
}

TEST(FullyShardEngine, AccumulatesWithAndWithoutSync) {
  const MLPStacked start(2);
  for (const char* shape : {"dp=2", "replicate=2,shard=2"}) {
    const int64_t ranks = std::string(shape) == "dp=2" ? 2 : 4;
    const auto data = batches(ranks);
    run_ranks(ranks, [&](Rank& me) {
      auto plain = clone(start), model = clone(start);
      shard_blocks(model, {.mesh = me.mesh(shape)});
      auto fsdp = fsdp_module(*model);
      const auto& mine = data[static_cast<size_t>(me.rank)];
      const auto pass = [&](int64_t expected) {
        CommDebugMode comm;
        stack_loss(model, mine).backward();
        EXPECT_EQ(reductions(comm), expected);
        accumulate_means(plain, data, stack_loss);
      };
      pass(2);
      expect_gradients(*model, *plain);
      fsdp.set_requires_gradient_sync(false);
      pass(0);
      pass(0);
      fsdp.set_requires_gradient_sync(true);
      pass(2);
      expect_gradients(*model, *plain);
    });
  }
}

TEST(FullyShardEngine, AllReduceCanBeDeferred) {
  const MLPStacked start(2);
  const auto data = batches(4);
  run_ranks(4, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    shard_blocks(model, {.mesh = me.mesh("replicate=2,shard=2")});
    auto fsdp = fsdp_module(*model);
    for (const bool all_reduce : {true, false, false, true}) {
      fsdp.set_requires_all_reduce(all_reduce);
      CommDebugMode comm;
      stack_loss(model, data[static_cast<size_t>(me.rank)]).backward();
      accumulate_means(plain, data, stack_loss);
      EXPECT_EQ(reductions(comm), 2);
      EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllReduce, Family::C10d), all_reduce ? 2 : 0);
    }
    expect_gradients(*model, *plain);
  });
}

// A sharded parameter is a DTensor: ops on it between steps have gradients too.
TEST(FullyShardEngine, PenaltyOnShardedParameters) {
  const MLPStacked start(2);
  const auto data = batches(3);
  run_ranks(3, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    shard_blocks(model, {.mesh = me.mesh("dp=3")});
    const auto penalty = [](const Module& m) {
      for (const auto& p : m.parameters()) p.pow(2).sum().backward();
    };
    for (int i = 0; i < 2; i++) {
      penalty(*model);
      stack_loss(model, data[static_cast<size_t>(me.rank)]).backward();
      penalty(*model);
      penalty(*plain);
      accumulate_means(plain, data, stack_loss);
      penalty(*plain);
      expect_gradients(*model, *plain);
    }
  });
}

// Outputs that are not one tensor. With `hidden`, backward starts from a tensor that is not an output of forward.
struct Pair {
  at::Tensor first;
  std::vector<at::Tensor> more;
  friend void tessera_visit(Pair& pair, auto&& field) { field(pair.first), field(pair.more); }
};
struct PairImpl : torch::nn::Cloneable<PairImpl> {
  explicit PairImpl(bool hidden = false) : hidden(hidden) { reset(); }
  void reset() override {
    mlp = register_module("mlp", MLP(models::mlp_module()));
    scale = register_parameter("scale", torch::ones({10}));
  }
  Pair forward(at::Tensor x) {
    const auto y = mlp(x);
    side = y + scale;  // autograd saves nothing of scale
    return hidden ? Pair{y.detach(), {}} : Pair{y, {side, y * 2}};
  }
  bool hidden;
  MLP mlp{nullptr};
  at::Tensor scale, side;
};
TESSERA_MODULE_IMPL(PairModule, PairImpl);

TEST(FullyShardEngine, OutputsOfAnyType) {
  const auto data = batches(2);
  for (const bool hidden : {false, true}) {
    const PairModule start(hidden);
    run_ranks(2, [&](Rank& me) {
      auto plain = clone(start), model = clone(start);
      plain->hidden = model->hidden = hidden;
      fully_shard(model, {.mesh = me.mesh("dp=2")});
      const auto loss = [](PairModule& m, const at::Tensor& x) {
        const auto out = m(x);
        return out.more.empty() ? m->side.pow(2).mean() : (out.first + out.more[0] * out.more[1]).mean();
      };
      expect_two_steps(me, model, plain, data, 1, loss);
    });
  }
}

TEST(FullyShardEngine, ActivationCheckpointingInsideAndAround) {
  expect_same_as_plain(
      MLPStacked(3), 2, {}, [](MLPStacked& m, const at::Tensor& x) { stack_loss(m, x).backward(); },
      [](MLPStacked& m) {
        checkpoint_wrapper(m->layers[0]);
        checkpoint_wrapper(m->layers[2]->layers[0]);
      });
}

// Modules that share one weight.
struct ProjectImpl : torch::nn::Module {
  explicit ProjectImpl(const at::Tensor& given) { weight = register_parameter("weight", given); }
  at::Tensor forward(at::Tensor x) { return torch::mm(x, weight); }
  at::Tensor weight;
};
TESSERA_MODULE(Project);
struct TiedBlocksImpl : torch::nn::Module {
  TiedBlocksImpl() {
    const auto weight = torch::linspace(-1, 1, 110).view({11, 10}).narrow(0, 1, 10).sin().set_requires_grad(true);
    in = register_module("in", Project(weight));
    middle = register_module("middle", MLP(models::mlp_module()));
    out = register_module("out", Project(in->weight));
  }
  at::Tensor forward(at::Tensor x) { return out(middle(in(x))); }
  Project in{nullptr}, out{nullptr};
  MLP middle{nullptr};
};
TESSERA_MODULE(TiedBlocks);

TEST(FullyShardEngine, TiedParametersInOneGroup) {
  const auto data = batches(2);
  const auto loss = [](TiedBlocks& m, const at::Tensor& x) { return m(x).pow(2).mean(); };
  for (const bool apart : {false, true})  // in the root's group, and in their own group
    run_ranks(2, [&](Rank& me) {
      TiedBlocks plain, model;
      const FullyShardOptions options{.mesh = me.mesh("dp=2")};
      fully_shard(model->middle, options);
      if (apart) fully_shard({model->in.ptr(), model->out.ptr()}, options);
      fully_shard(model, options);
      expect_two_steps(me, model, plain, data, 2, loss);
      EXPECT_TRUE(model->in->weight.is_same(model->out->weight));
    });
}

TEST(FullyShardEngine, TiedParametersInTwoGroupsAreAnError) {
  run_ranks(2, [](Rank& me) {
    TiedBlocks model;
    const FullyShardOptions options{.mesh = me.mesh("dp=2")};
    fully_shard(model->in, options);
    fully_shard(model, options);
    EXPECT_ERROR(UsageError, model(torch::ones({2, 10})), "out.weight", "weight of the parameter group Project",
                 "fully_shard({a, b})");
    expect_sharded(*model);
  });
}

TEST(FullyShardEngine, ModulesThatDifferBetweenRanksAreAnError) {
  run_ranks(2, [](Rank& me) {
    MLP model(me.rank == 0 ? models::mlp_module() : models::mlp_module(/*bias=*/false));
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    EXPECT_ERROR(UsageError, model(torch::ones({2, 10})), "net1.bias", "net2.weight", "Rank 1");
  });
}

// Built on the meta device, sharded, then materialized: only this rank's shard is ever allocated.
TEST(FullyShardEngine, DeferredInit) {
  manual_seed(3);
  const auto plain_start = deferred_init([] {
    return MLPStacked(2, models::MLPConfig{.layers = {{"net", 300, 300}}});
  });
  materialize(plain_start);
  const auto data = batches(2, {4, 300});
  run_ranks(2, [&](Rank& me) {
    manual_seed(3);
    auto model = deferred_init([] { return MLPStacked(2, models::MLPConfig{.layers = {{"net", 300, 300}}}); });
    auto plain = clone(plain_start);
    shard_blocks(model, {.mesh = me.mesh("dp=2")});
    EXPECT_ERROR(UsageError, model(data[0]), "net.weight", "materialize(model)");
    {
      CommDebugMode comm;
      materialize(model);
      EXPECT_EQ(comm.get_total_counts(), 0);
    }
    const auto wanted = plain->named_parameters();
    for (const auto& item : model->named_parameters()) {
      EXPECT_EQ(DTensor(item.value().detach()).to_local().size(0), 150) << item.key();
      EXPECT_EQ(close(full_value(item.value()), wanted[item.key()].detach(), kExact), "") << item.key();
    }
    optim::SGD plain_opt(plain->parameters(), {.lr = 0.1}), opt(model->parameters(), {.lr = 0.1});
    for (int step = 0; step < 2; step++) {
      plain_opt.zero_grad();
      opt.zero_grad();
      stack_loss(model, data[static_cast<size_t>(me.rank)]).backward();
      accumulate_means(plain, data, stack_loss);
      expect_gradients(*model, *plain);
      plain_opt.step();
      opt.step();
    }
    for (const auto& item : model->named_parameters())
      EXPECT_EQ(close(full_value(item.value()), wanted[item.key()].detach()), "") << item.key();
  });
}

// Values that are set by set_data(), as in loading by assignment, are used.
TEST(FullyShardEngine, ValuesSetBySetData) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    MLP model(models::mlp_module());
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    const torch::NoGradGuard no_grad;
    model(data[0]);
    auto& weight = model->layers[0]->weight;
    weight.set_data(zeros(weight.sizes(), me.mesh("dp=2"), {Shard(0)}));
    auto& bias = model->layers[0]->bias;
    bias.set_data(zeros(bias.sizes(), me.mesh("dp=2"), {Shard(0)}));
    EXPECT_EQ(close(model(data[0])[0], full_value(model->layers[1]->bias)), "");
    weight.set_data(torch::zeros({16, 10}));
    EXPECT_ERROR(UsageError, model(data[0]), "net1.weight", "change only its values");
  });
}

}  // namespace
}  // namespace tessera
