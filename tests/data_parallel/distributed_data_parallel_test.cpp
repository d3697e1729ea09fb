#include "tessera/data_parallel/distributed_data_parallel.h"

#include "tessera/debug/comm_debug_mode.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/optim/sgd.h"
#include "tessera/state/state_dict.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/detail/recorder.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/data_parallel.h"
#include "tests/fixtures/ddp.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera {
namespace {

using namespace fixtures;
using comm::CommKind;

int64_t count(const CommDebugMode& mode, CommKind kind) { return mode.get_comm_counts().of(kind, comm::Family::C10d); }
int64_t all_reduces(const CommDebugMode& mode) { return count(mode, CommKind::AllReduce); }

void train_three_steps(int64_t ranks, const DDPOptions& options) {
  const auto start = mlp();
  const auto data = batches(ranks);
  run_ranks(ranks, [&](Rank& me) {
    train_ddp_beside_plain(start, data, me.rank, options, at::kCPU,
                           [&](int step, auto& ddp, const CommDebugMode& comm) {
                             const auto buckets = static_cast<int64_t>(ddp->replica().reducer()->buckets().size());
                             EXPECT_EQ(all_reduces(comm), ranks == 1 ? 0 : buckets) << "step " << step;
                             EXPECT_EQ(comm.get_total_counts(), ranks == 1 ? 0 : buckets);
                             EXPECT_EQ(buckets, step == 0 ? 1 : 2);  // net2, net1
                           });
  });
}

TEST(DistributedDataParallel, GradientsAreMeans) {
  for (const int64_t ranks : {1, 2, 3, 4}) train_three_steps(ranks, {.bucket_cap_mb = kTinyMb});
}

TEST(DistributedDataParallel, GradientsAreMeansInBucketViews) {
  for (const int64_t ranks : {2, 4})
    train_three_steps(ranks, {.bucket_cap_mb = kTinyMb, .gradient_as_bucket_view = true});
}

TEST(DistributedDataParallel, GradientsAreMeansInAStaticGraph) {
  train_three_steps(2, {.bucket_cap_mb = kTinyMb, .static_graph = true});
}

// From step two on, when the order is known, bucket 1 is in flight before the last gradient is ready.
TEST(DistributedDataParallel, CommunicationOverlapsBackward) {
  struct Events : comm::Observer {
    std::vector<std::string> seen;
    void on_post(const comm::Record& record) override {
      if (record.counted()) seen.push_back("post");
    }
  };
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    Events events;
    for (const auto& item : model->named_parameters())
      register_post_accumulate_grad_hook(item.value(),
                                         [&, name = item.key()](const at::Tensor&) { events.seen.push_back(name); });
    DistributedDataParallel ddp(model, {.bucket_cap_mb = kTinyMb});
    const comm::ObserverScope observe(&events);
    for (int step = 0; step < 2; step++) {
      events.seen.clear();
      ddp(data[static_cast<size_t>(me.rank)]).sum().backward();
      const std::vector<std::string> first{"net2.bias", "net2.weight", "net1.bias", "net1.weight", "post"};
      const std::vector<std::string> later{"net2.bias", "net2.weight", "post", "net1.bias", "net1.weight", "post"};
      EXPECT_EQ(events.seen, step == 0 ? first : later);
    }
  });
}

TEST(DistributedDataParallel, GradientsAreViewsOfTheBuckets) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    const auto& batch = data[static_cast<size_t>(me.rank)];
    auto plain = clone(start), model = clone(start);
    DistributedDataParallel ddp(model, {.gradient_as_bucket_view = true});
    ddp(batch).pow(2).mean().backward();
    const auto first = model->parameters()[0].grad().data_ptr();
    // Without zero_grad(), gradients accumulate in place in the bucket, also when buckets are rebuilt.
    ddp(batch).pow(2).mean().backward();
    accumulate_means(plain, data, square_loss);
    accumulate_means(plain, data, square_loss);
    EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain)), "");
    const auto second = model->parameters()[0].grad().data_ptr();
    EXPECT_NE(first, second);  // the rebuilt bucket
    torch::optim::SGD opt(ddp->parameters(), 0.1);
    opt.zero_grad(/*set_to_none=*/false);
    plain->zero_grad();
    ddp(batch).pow(2).mean().backward();
    accumulate_means(plain, data, square_loss);
    EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain), kExact), "");
    EXPECT_EQ(model->parameters()[0].grad().data_ptr(), second);
    const auto storage = model->parameters()[0].grad().storage().data();
    for (const auto& p : model->parameters()) EXPECT_EQ(p.grad().storage().data(), storage);  // one bucket
  });
}

TEST(DistributedDataParallel, NoSyncAccumulatesAndTheNextBackwardReduces) {
  const MLP start(models::mlp_module());
  const auto data = batches(2), more = batches(2, {4, 10}, 8);
  for (const bool as_view : {false, true})
    run_ranks(2, [&](Rank& me) {
      auto plain = clone(start), model = clone(start);
      DistributedDataParallel ddp(model, {.gradient_as_bucket_view = as_view});
      const auto at = static_cast<size_t>(me.rank);
      {
        CommDebugMode comm;
        const auto guard = ddp->no_sync();
        ddp(data[at]).pow(2).mean().backward();
        EXPECT_EQ(comm.get_total_counts(), 0);
      }
      plain(data[at]).pow(2).mean().backward();
      EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain), kExact), "");  // local gradients
      ddp(more[at]).pow(2).mean().backward();
      plain->zero_grad();
      const auto both = [&](auto& m, const at::Tensor& pair) {
        return square_loss(m, pair[0]) + square_loss(m, pair[1]);
      };
      accumulate_means(plain, {torch::stack({data[0], more[0]}), torch::stack({data[1], more[1]})}, both);
      EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain)), "");
    });
}

TEST(DistributedDataParallel, SeveralForwardsAndSeveralBackwards) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    DistributedDataParallel ddp(model);
    const auto& batch = data[static_cast<size_t>(me.rank)];
    auto one = ddp(batch).pow(2).mean(), two = ddp(batch * 2).pow(2).mean();
    (one + two).backward();
    const auto sum = [](auto& m, const at::Tensor& x) { return square_loss(m, x) + square_loss(m, x * 2); };
    accumulate_means(plain, data, sum);
    EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain)), "");
    // One backward each: the second one reduces the accumulated gradients again.
    ddp->zero_grad();
    one = ddp(batch).pow(2).mean(), two = ddp(batch * 2).pow(2).mean();
    one.backward();
    two.backward();
    EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain)), "");
  });
}

// A model with two heads. A rank may use either one or both.
struct TwoHeadsImpl : torch::nn::Cloneable<TwoHeadsImpl> {
  nn::Linear body{nullptr}, left{nullptr}, right{nullptr};
  TwoHeadsImpl() { reset(); }
  void reset() override {
    body = register_module("body", nn::Linear(10, 6));
    left = register_module("left", nn::Linear(6, 3));
    right = register_module("right", nn::Linear(6, 3));
  }
  torch::Tensor forward(torch::Tensor x, bool use_left, bool use_right) {
    x = body(x).relu();
    if (use_left && use_right) return left(x) + right(x);
    return use_left ? left(x) : right(x);
  }
};
TESSERA_MODULE(TwoHeads);

TEST(DistributedDataParallel, UnusedParametersAreFound) {
  torch::manual_seed(3);
  const TwoHeads start;
  const auto data = batches(2);
  for (const bool as_view : {false, true})
    run_ranks(2, [&](Rank& me) {
      auto plain = clone(start), model = clone(start);
      DistributedDataParallel ddp(model, {.find_unused_parameters = true, .gradient_as_bucket_view = as_view});
      const auto& batch = data[static_cast<size_t>(me.rank)];
      // Rank 0 uses left, rank 1 uses right: the mean counts zeros for the other rank.
      CommDebugMode comm;
      ddp(batch, me.rank == 0, me.rank == 1).sum().backward();
      EXPECT_EQ(all_reduces(comm), 1 + 1);  // one bucket, and which parameters were used
      plain(data[0], true, false).sum().backward();
      plain(data[1], false, true).sum().backward();
      for (const auto& p : plain->parameters()) p.mutable_grad() = p.grad() * 0.5;
      EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain)), "");
      // No rank uses left: its gradient does not change. Existing gradients are accumulated, not halved.
      const auto before = model->left->weight.grad().clone();
      ddp(batch, false, true).sum().backward();
      EXPECT_EQ(close(model->left->weight.grad(), before, kExact), "");
      ddp->zero_grad();
      ddp(batch, false, true).sum().backward();
      EXPECT_FALSE(model->left->weight.grad().defined());
    });
}

TEST(DistributedDataParallel, AccumulatedGradientsOfParametersUnusedHereAreNotHalved) {
  torch::manual_seed(3);
  const TwoHeads start;
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    DistributedDataParallel ddp(model, {.find_unused_parameters = true});
    const auto& batch = data[static_cast<size_t>(me.rank)];
    ddp(batch, true, true).sum().backward();
    ddp(batch, me.rank == 0, true).sum().backward();  // left: on rank 0 only
    plain(data[0], true, true).sum().backward();
    plain(data[1], true, true).sum().backward();
    plain(data[0], true, true).sum().backward();
    plain(data[1], false, true).sum().backward();
    for (const auto& p : plain->parameters()) p.mutable_grad() = p.grad() * 0.5;
    EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain)), "");
  });
}

// Three backward passes of a module in DDP with a static graph: one collective each. check(model, plain) compares them.
template <class Handle, class Loss, class Check>
void expect_one_collective_per_step(const Handle& start, Loss loss, Check check) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    DistributedDataParallel ddp(model, {.static_graph = true});
    for (int step = 0; step < 3; step++) {
      ddp->zero_grad();
      plain->zero_grad();
      CommDebugMode comm;
      loss(ddp, data[static_cast<size_t>(me.rank)]).backward();
      EXPECT_EQ(comm.get_total_counts(), 1);
      accumulate_means(plain, data, loss);
      check(model, plain);
    }
  });
}

TEST(DistributedDataParallel, StaticGraphNeedsNoCollectiveForUnusedParameters) {
  torch::manual_seed(3);
  expect_one_collective_per_step(
      TwoHeads(), [](auto& module, const at::Tensor& x) { return module(x, true, false).sum(); },
      [](const TwoHeads& model, const TwoHeads& plain) {
        EXPECT_FALSE(model->right->weight.grad().defined());
        EXPECT_EQ(close(model->body->weight.grad(), plain->body->weight.grad(), kExact), "");
        EXPECT_EQ(close(model->left->bias.grad(), plain->left->bias.grad(), kExact), "");
      });
}

// A function whose backward runs another backward, which computes a part of the gradients.
struct Nested : torch::autograd::Function<Nested> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, nn::Linear* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
    return (*layer)(x).relu().detach();
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const at::AutoGradMode on(true);
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    auto& layer = *reinterpret_cast<nn::Linear*>(context->saved_data["layer"].toInt());
    layer(x).relu().backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

struct NestedTwiceImpl : torch::nn::Cloneable<NestedTwiceImpl> {
  nn::Linear layer{nullptr};
  NestedTwiceImpl() { reset(); }
  void reset() override { layer = register_module("layer", nn::Linear(10, 10)); }
  torch::Tensor forward(torch::Tensor x) {
    x = x.detach().requires_grad_();
    return Nested::apply(Nested::apply(x, &layer), &layer);
  }
};
TESSERA_MODULE(NestedTwice);

TEST(DistributedDataParallel, StaticGraphAllowsNestedBackward) {
  torch::manual_seed(3);
  expect_one_collective_per_step(
      NestedTwice(), [](auto& module, const at::Tensor& x) { return module(x).sum(); },
      [](const NestedTwice& model, const NestedTwice& plain) {
        EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain)), "");
      });
}

struct WithBuffersImpl : torch::nn::Cloneable<WithBuffersImpl> {
  nn::BatchNorm1d norm{nullptr};
  nn::Linear layer{nullptr};
  WithBuffersImpl() { reset(); }
  void reset() override {
    norm = register_module("norm", nn::BatchNorm1d(10));
    layer = register_module("layer", nn::Linear(10, 2));
  }
  torch::Tensor forward(torch::Tensor x) { return layer(norm(x)); }
};
TESSERA_MODULE(WithBuffers);

TEST(DistributedDataParallel, BuffersAreBroadcastFromRank0) {
  const WithBuffers start;
  const auto data = batches(2);
  for (const bool broadcast : {true, false})
    run_ranks(2, [&](Rank& me) {
      auto model = clone(start), plain = clone(start);
      if (me.rank == 1) model->norm->running_mean.fill_(9);
      DistributedDataParallel ddp(model, {.broadcast_buffers = broadcast});
      EXPECT_EQ(close(model->norm->running_mean, torch::zeros(10), kExact), "");  // at construction, in both cases
      ddp(data[static_cast<size_t>(me.rank)]).sum().backward();
      plain(data[0]);
      CommDebugMode comm;
      const torch::NoGradGuard no_grad;
      ddp->eval();
      ddp(data[0]);
      EXPECT_EQ(count(comm, CommKind::Broadcast), broadcast ? 2 : 0);  // floats, and num_batches_tracked
      const bool equal = close(model->norm->running_mean, plain->norm->running_mean, kExact).empty();
      EXPECT_EQ(equal, broadcast || me.rank == 0);
    });
}

struct MixedImpl : torch::nn::Cloneable<MixedImpl> {
  nn::Linear single{nullptr}, twice{nullptr};
  MixedImpl() { reset(); }
  void reset() override {
    single = register_module("single", nn::Linear(10, 6));
    twice = register_module("twice", nn::Linear(6, 2));
    twice->to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) { return twice(single(x).to(torch::kDouble)); }
};
TESSERA_MODULE(Mixed);

TEST(DistributedDataParallel, EachDtypeHasItsOwnBuckets) {
  torch::manual_seed(3);
  const Mixed start;
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    DistributedDataParallel ddp(model);
    for (int step = 0; step < 2; step++) {
      ddp->zero_grad();
      plain->zero_grad();
      CommDebugMode comm;
      ddp(data[static_cast<size_t>(me.rank)]).sum().backward();
      EXPECT_EQ(all_reduces(comm), 2);
      accumulate_means(plain, data, [](auto& m, const at::Tensor& x) { return m(x).sum(); });
      EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain), kExact), "");
    }
  });
}

TEST(DistributedDataParallel, ParametersMayBeFrozenAndUnfrozen) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    DistributedDataParallel ddp(model);
    for (const int step : {0, 1, 2}) {
      const bool frozen = step == 1;
      for (auto& m : {plain, model}) m->layers[0]->weight.requires_grad_(!frozen);
      ddp->zero_grad();
      plain->zero_grad();
      for (auto& m : {plain, model}) m->layers[0]->weight.mutable_grad().reset();
      CommDebugMode comm;
      ddp(data[static_cast<size_t>(me.rank)]).pow(2).mean().backward();
      accumulate_means(plain, data, square_loss);
      EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain), kExact), "") << frozen;
      // After a change the ranks compare what is frozen: four bytes.
      EXPECT_EQ(comm.get_bytes_by_axis().begin()->second,
                (frozen ? 16 + 160 + 10 : 160 + 16 + 160 + 10) * 4 + (step > 0 ? 4 : 0));
    }
  });
}

struct TiedPartImpl : torch::nn::Module {
  torch::Tensor weight;
  explicit TiedPartImpl(const torch::Tensor& shared) { weight = register_parameter("weight", shared); }
};
struct TiedImpl : torch::nn::Module {
  std::shared_ptr<TiedPartImpl> one, two;
  TiedImpl() {
    const auto shared = torch::eye(10).requires_grad_();
    one = register_module("one", std::make_shared<TiedPartImpl>(shared));
    two = register_module("two", std::make_shared<TiedPartImpl>(shared));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x.mm(one->weight).relu().mm(two->weight); }
};

TEST(DistributedDataParallel, TiedParametersAreReducedOnce) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = std::make_shared<TiedImpl>();
    TiedImpl plain;
    DistributedDataParallel ddp(model);
    CommDebugMode comm;
    ddp(data[static_cast<size_t>(me.rank)]).pow(2).sum().backward();
    EXPECT_EQ(comm.get_bytes_by_axis().begin()->second, 100 * 4);
    for (const auto& batch : data) (plain.forward(batch).pow(2).sum() * 0.5).backward();
    EXPECT_EQ(close(model->one->weight.grad(), plain.one->weight.grad()), "");
  });
}

TEST(DistributedDataParallel, TwoModelsInOneProcess) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto a = clone(start), b = clone(start), plain_a = clone(start), plain_b = clone(start);
    DistributedDataParallel first(a), second(b);
    for (int step = 0; step < 2; step++) {
      for (auto m : {a, b, plain_a, plain_b}) m->zero_grad();
      second(first(data[static_cast<size_t>(me.rank)])).pow(2).mean().backward();
      for (const auto& batch : data) (plain_b(plain_a(batch)).pow(2).mean() * 0.5).backward();
      EXPECT_EQ(close(gradients_of(*a), gradients_of(*plain_a)), "");
      EXPECT_EQ(close(gradients_of(*b), gradients_of(*plain_b)), "");
    }
  });
}

TEST(DistributedDataParallel, TakesAC10dProcessGroup) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    DistributedDataParallel ddp(model, {.process_group = me.group()->process_group()});
    EXPECT_EQ(ddp->replica().group()->ranks(), me.group()->ranks());
    ddp(data[static_cast<size_t>(me.rank)]).pow(2).mean().backward();
    accumulate_means(plain, data, square_loss);
    EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain), kExact), "");
  });
}

struct CheckpointedImpl : torch::nn::Cloneable<CheckpointedImpl> {
  MLP inner{nullptr};
  CheckpointedImpl() { reset(); }
  void reset() override { inner = register_module("inner", MLP(models::mlp_module())); }
  torch::Tensor forward(torch::Tensor x) {
    return checkpoint([this](torch::Tensor y) { return inner(y); }, x);
  }
};
TESSERA_MODULE(Checkpointed);

TEST(DistributedDataParallel, ActivationCheckpointingInsideAndAround) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), around = clone(start);
    Checkpointed inside;
    DistributedDataParallel ddp(inside, {.bucket_cap_mb = kTinyMb});
    DistributedDataParallel wrapped(around, {.bucket_cap_mb = kTinyMb});
    accumulate_means(plain, data, square_loss);
    for (int step = 0; step < 3; step++) {
      ddp->zero_grad();
      wrapped->zero_grad();
      const auto& batch = data[static_cast<size_t>(me.rank)];
      ddp(batch).pow(2).mean().backward();
      EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain), kExact), "");
      auto x = batch.clone().requires_grad_();
      checkpoint([&](torch::Tensor y) { return wrapped(y); }, x).pow(2).mean().backward();
      EXPECT_EQ(close(gradients_of(*wrapped), gradients_of(*plain), kExact), "");
    }
  });
}

// Any signature of forward, and modules without a Tessera holder.
struct Outputs {
  at::Tensor a;
  std::vector<at::Tensor> more;
  friend void tessera_visit(Outputs& o, auto&& field) { field(o.a), field(o.more); }
};
struct FreeImpl : torch::nn::Module {
  torch::nn::Linear layer{nullptr};
  FreeImpl() { layer = register_module("layer", torch::nn::Linear(10, 2)); }
  Outputs forward(const torch::Tensor& x, double scale, const std::string& how) {
    EXPECT_EQ(how, "gently");
    return {layer(x) * scale, {layer(x * 2)}};
  }
};

TEST(DistributedDataParallel, ForwardTakesTheArgumentsOfTheModule) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto module = std::make_shared<FreeImpl>();
    DistributedDataParallel ddp(module, {.static_graph = true});
    EXPECT_EQ(ddp->named_parameters().keys(), (std::vector<std::string>{"module.layer.weight", "module.layer.bias"}));
    EXPECT_EQ(ddp->module.get(), module.get());
    const Outputs out = ddp(data[static_cast<size_t>(me.rank)], 0.5, "gently");
    (out.a.sum() + out.more[0].sum()).backward();
    EXPECT_EQ(close(module->layer->bias.grad(), torch::full(2, 0.5 * 4 + 4)), "");
  });
}

// Backward consists of registered ops only: recorded and replayed, it computes the same gradients.
TEST(DistributedDataParallel, BackwardCanBeTracedAndReplayed) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    DistributedDataParallel ddp(model, {.bucket_cap_mb = kTinyMb});
    const auto& batch = data[static_cast<size_t>(me.rank)];
    for (int step = 0; step < 2; step++) ddp(batch).pow(2).mean().backward();
    const torch::NoGradGuard no_grad;
    for (const auto& p : model->parameters()) p.mutable_grad().zero_();
    auto recorded = [&] {
      const torch::AutoGradMode on(true);
      auto loss = ddp(batch).pow(2).mean();
      testing::Recorder recorder;
      loss.backward();
      recorder.stop();
      const auto ops = recorder.ops();
      EXPECT_EQ(std::count(ops.begin(), ops.end(), "tessera::all_reduce_"), 2);
      const auto expected = gradients_of(*model);
      for (const auto& p : model->parameters()) p.grad().detach().zero_();
      recorder.replay();
      return expected;
    }();
    EXPECT_EQ(close(gradients_of(*model), recorded, kExact), "");
  });
}

}  // namespace
}  // namespace tessera
