// Steps with sharded modules, compiled: what they do is what the eager step does, bit by bit, by the same collectives.
#include "tessera/comm/detail/records.h"
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/fsdp/detail/api/clip_grad.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/dtensor/random.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/models/mlp.h"
#include "tessera/models/plans.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/nn/hooks.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>

namespace tessera {
namespace {

using models::GPT2;
using models::MLPStacked;
using testing::Rank;
using testing::run_ranks;

const models::GPT2Config kGpt{
    .vocab_size = 13, .max_seq_len = 9, .n_layer = 2, .n_head = 2, .n_embd = 12, .bias = true};

auto& blocks_of(MLPStacked& model) { return model->layers; }
auto& blocks_of(GPT2& model) { return model->h; }

at::Tensor batch_for(const MLPStacked&, int64_t rows) { return torch::randn({rows, 10}); }
at::Tensor batch_for(const GPT2&, int64_t rows) { return torch::randint(kGpt.vocab_size, {rows, 7}, torch::kLong); }

at::Tensor loss_of(MLPStacked& model, const at::Tensor& x) { return model(x).to(at::kFloat).pow(2).mean(); }
at::Tensor loss_of(GPT2& model, const at::Tensor& x) { return models::loss(model(x).to(at::kFloat), x.roll(1, 1)); }

template <class Model>
using Step = std::function<at::Tensor(Model&, optim::Optimizer&, const at::Tensor&)>;

template <class Model>
at::Tensor train(Model& model, optim::Optimizer& opt, const at::Tensor& x) {
  opt.zero_grad();
  auto loss = loss_of(model, x);
  loss.backward();
  opt.step();
  return loss;
}
const Step<MLPStacked> kStep = train<MLPStacked>;

// ---- what is sharded how

template <class Model>
using Cut = std::function<void(Model&, Rank&)>;

template <class Model>
Cut<Model> fully_sharded(const std::string& mesh, const FullyShardOptions& given = {}) {
  return [=](Model& model, Rank& me) {
    auto options = given;
    options.mesh = me.mesh(mesh);
    for (auto& block : blocks_of(model)) fully_shard(block, options);
    fully_shard(model, options);
  };
}
template <class Model>
Cut<Model> flat(const std::string& mesh, const FSDPOptions& given = {}) {
  return [=](Model& model, Rank& me) {
    auto options = given;
    options.device_mesh = me.mesh(mesh);
    for (auto& block : blocks_of(model)) FullyShardedDataParallel(block, options);
    FullyShardedDataParallel wrapped(model, options);
  };
}

// ---- eager and compiled, side by side

struct Collectives : comm::Observer {
  std::vector<std::string> seen;
  void on_post(const comm::Record& record) override {
    if (record.counted()) seen.push_back(c10::str(record.group, " ", record.kind, " ", record.bytes));
  }
  std::vector<std::string> sorted() const {
    auto lines = seen;
    std::sort(lines.begin(), lines.end());
    return lines;
  }
};

void expect_equal_bits(const torch::nn::Module& found, const torch::nn::Module& wanted) {
  const auto plain = [](const at::Tensor& t) { return is_dtensor(t) ? tessera::detail::local_of(t) : t.detach(); };
  const auto a = found.named_parameters(), b = wanted.named_parameters();
  ASSERT_EQ(a.size(), b.size());
  for (const auto& item : a) {
    const auto &x = item.value(), &y = b[item.key()];
    EXPECT_TRUE(at::equal(plain(x), plain(y))) << item.key();
    ASSERT_EQ(x.grad().defined(), y.grad().defined()) << item.key();
    if (x.grad().defined()) {
      EXPECT_TRUE(at::equal(plain(x.grad()), plain(y.grad()))) << "gradient of " << item.key();
    }
  }
}

enum class Kind { SGD, AdamW };
std::unique_ptr<optim::Optimizer> optimizer_of(Kind kind, const torch::nn::Module& model) {
  if (kind == Kind::SGD)
    return std::make_unique<optim::SGD>(model.parameters(), optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  return std::make_unique<optim::AdamW>(model.parameters(), optim::AdamWOptions{.lr = 0.01, .fused = true});
}

constexpr int kSteps = 5;

// Of step(model, optimizer, batch), on `ranks` ranks.
template <class Model>
void expect_same(Kind kind, int64_t ranks, const Model& start, const Cut<Model>& cut,
                 const Step<Model>& step = train<Model>, bool codegen = false) {
  std::vector<Tensors> data(static_cast<size_t>(ranks));
  for (auto& own : data)
    for (int i = 0; i < kSteps; i++) own.push_back(batch_for(start, 4));
  run_ranks(ranks, [&](Rank& me) {
    auto eager = clone(start), model = clone(start);
    cut(eager, me);
    cut(model, me);
    const auto eager_opt = optimizer_of(kind, *eager), opt = optimizer_of(kind, *model);
    auto compiled = compile(step, {.codegen = codegen, .verified = true});
    for (int i = 0; i < kSteps; i++) {
      const auto& x = data[static_cast<size_t>(me.rank)][static_cast<size_t>(i)];
      Collectives by_eager, by_program;
      const auto wanted = [&] {
        const comm::ObserverScope observe(&by_eager);
        return step(eager, *eager_opt, x);
      }();
      const auto programs = compiled.cache().size();
      const auto found = [&] {
        const comm::ObserverScope observe(&by_program);
        return compiled(model, *opt, x);
      }();
      ASSERT_TRUE(at::equal(found, wanted.detach())) << "loss " << i;
      expect_equal_bits(*model, *eager);
      // The call that compiles also asks the ranks whether they agree.
      if (compiled.cache().size() == programs) {
        EXPECT_EQ(by_program.sorted(), by_eager.sorted()) << i;
      }
    }
    EXPECT_LE(compiled.cache().size(), 2u);
  });
}

TEST(CompiledFsdp, FullyShard) {
  const MLPStacked start(3);
  for (const int64_t ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    const auto cut = fully_sharded<MLPStacked>(c10::str("dp=", ranks));
    expect_same(Kind::SGD, ranks, start, cut);
    expect_same(Kind::AdamW, ranks, start, cut);
  }
}

TEST(CompiledFsdp, FlatParameters) {
  const MLPStacked start(3);
  for (const int64_t ranks : {1, 2, 4})
    for (const bool originals : {false, true}) {
      SCOPED_TRACE(c10::str(ranks, " ranks, ", originals));
      const auto cut = flat<MLPStacked>(c10::str("dp=", ranks), {.use_orig_params = originals});
      expect_same(Kind::AdamW, ranks, start, cut);
    }
}

TEST(CompiledFsdp, ShardingOfEachKind) {
  const MLPStacked start(3);
  using S = ShardingStrategy;
  const auto hybrid = "replicate=2,shard=2";
  const auto by_columns = [](const at::Tensor& p) { return std::optional<int64_t>(p.dim() - 1); };
  const MixedPrecisionPolicy bf16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  struct Case {
    const char* name;
    int64_t ranks;
    Cut<MLPStacked> cut;
  };
  const Case cases[] = {
      {"kept after forward", 2, fully_sharded<MLPStacked>("dp=2", {.reshard_after_forward = false})},
      {"among a few", 4, fully_sharded<MLPStacked>("dp=4", {.reshard_after_forward = 2})},
      {"by columns", 4, fully_sharded<MLPStacked>("dp=4", {.shard_placement_fn = by_columns})},
      {"HSDP", 4, fully_sharded<MLPStacked>(hybrid)},
      {"bfloat16", 2, fully_sharded<MLPStacked>("dp=2", {.mp_policy = bf16})},
      {"SHARD_GRAD_OP", 2, flat<MLPStacked>("dp=2", {.sharding_strategy = S::ShardGradOp})},
      {"NO_SHARD", 2, flat<MLPStacked>("dp=2", {.sharding_strategy = S::NoShard})},
      {"HYBRID_SHARD", 4, flat<MLPStacked>(hybrid, {.sharding_strategy = S::HybridShard, .use_orig_params = true})},
      {"flat, bfloat16", 2, flat<MLPStacked>("dp=2", {.mixed_precision = {.param_dtype = at::kBFloat16}})},
      {"nothing ahead", 2,
       flat<MLPStacked>("dp=2", {.forward_prefetch = false, .backward_prefetch = BackwardPrefetch::None})},
  };
  for (const auto& [name, ranks, cut] : cases) {
    SCOPED_TRACE(name);
    expect_same(Kind::AdamW, ranks, start, cut);
  }
}

// Nothing in backward frees the buffers; each step gathers anew, because the one before has changed the parameters.
TEST(CompiledFsdp, KeptAfterBackward) {
  const auto cut = [](MLPStacked& model, Rank& me) {
    fully_sharded<MLPStacked>("dp=2")(model, me);
    fsdp_module(*model).set_reshard_after_backward(false);
  };
  expect_same(Kind::AdamW, 2, MLPStacked(3), Cut<MLPStacked>(cut));
}

TEST(CompiledFsdp, GptOverTensorParallelism) {
  GPT2 start(kGpt);
  const Cut<GPT2> cut = [](GPT2& model, Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    parallelize_module(model, mesh["tp"], models::tensor_parallel_plan(kGpt));
    for (auto& block : model->h) fully_shard(block, {.mesh = mesh["dp"]});
    fully_shard(model, {.mesh = mesh["dp"]});
  };
  expect_same(Kind::AdamW, 4, start, cut);
  expect_same(Kind::AdamW, 2, start, flat<GPT2>("dp=2", {.use_orig_params = true}));
}

TEST(CompiledFsdp, ClippedGradients) {
  const Step<MLPStacked> step = [](MLPStacked& model, optim::Optimizer& opt, const at::Tensor& x) {
    opt.zero_grad();
    auto loss = loss_of(model, x);
    loss.backward();
    const auto norm = data_parallel::fsdp::clip_grad_norm_(*model, 0.01, 2);
    opt.step();
    return loss + norm;
  };
  const MLPStacked start(3);
  expect_same(Kind::SGD, 4, start, fully_sharded<MLPStacked>("replicate=2,shard=2"), step);
  expect_same(Kind::SGD, 2, start, flat<MLPStacked>("dp=2"), step);
}

// ---- gradients from several backwards

// Whole gradients, inside of one step.
TEST(CompiledFsdp, AccumulationInAStep) {
  const Step<MLPStacked> step = [](MLPStacked& model, optim::Optimizer& opt, const at::Tensor& x) {
    opt.zero_grad();
    auto fsdp = fsdp_module(*model);
    fsdp.set_requires_gradient_sync(false);
    auto loss = loss_of(model, x.narrow(0, 0, 2));
    loss.backward();
    fsdp.set_requires_gradient_sync(true);
    auto last = loss_of(model, x.narrow(0, 2, 2));
    last.backward();
    opt.step();
    return loss + last;
  };
  const MLPStacked start(3);
  expect_same(Kind::SGD, 2, start, fully_sharded<MLPStacked>("dp=2"), step);
  expect_same(Kind::SGD, 4, start, fully_sharded<MLPStacked>("replicate=2,shard=2"), step);
}

// Compiled calls that leave whole gradients, or reduced ones, to the next; the optimizer steps at every third.
void expect_same_over_calls(const Cut<MLPStacked>& cut, bool whole) {
  const MLPStacked start(3);
  std::vector<Tensors> data(2);
  for (auto& own : data)
    for (int i = 0; i < 9; i++) own.push_back(torch::randn({4, 10}));
  run_ranks(2, [&](Rank& me) {
    auto eager = clone(start), model = clone(start);
    cut(eager, me);
    cut(model, me);
    const auto eager_opt = optimizer_of(Kind::SGD, *eager), opt = optimizer_of(Kind::SGD, *model);
    const auto step = [=](MLPStacked& m, optim::Optimizer& o, const at::Tensor& x, int part) {
      if (part == 0) o.zero_grad();
      if (whole) fsdp_module(*m).set_requires_gradient_sync(part == 2);
      auto loss = loss_of(m, x);
      loss.backward();
      if (part == 2) o.step();
      return loss;
    };
    auto compiled = compile(step, {.codegen = false, .verified = true});
    size_t programs = 0;
    for (int i = 0; i < 9; i++) {
      const auto& x = data[static_cast<size_t>(me.rank)][static_cast<size_t>(i)];
      const auto wanted = step(eager, *eager_opt, x, i % 3);
      ASSERT_TRUE(at::equal(compiled(model, *opt, x, i % 3), wanted.detach())) << i;
      expect_equal_bits(*model, *eager);
      if (i == 5) programs = compiled.cache().size();
    }
    // The third round is the second's. Reduced gradients that a later call adds to are in use by its program, so each
    // round gets new ones, and a program for those.
    if (whole) {
      EXPECT_EQ(compiled.cache().size(), programs);
    }
  });
}

TEST(CompiledFsdp, GradientsThatWaitForALaterCall) {
  expect_same_over_calls(fully_sharded<MLPStacked>("dp=2"), true);
  expect_same_over_calls(fully_sharded<MLPStacked>("dp=2"), false);
  expect_same_over_calls(flat<MLPStacked>("dp=2"), false);
}

// ---- what is around a program

// An eager step between two compiled ones is as if all were eager; a changed setting is taken up.
TEST(CompiledFsdp, MixesWithEagerSteps) {
  const MLPStacked start(3);
  std::vector<Tensors> data(2);
  for (auto& own : data)
    for (int i = 0; i < 8; i++) own.push_back(torch::randn({4, 10}));
  run_ranks(2, [&](Rank& me) {
    auto eager = clone(start), model = clone(start);
    const auto cut = fully_sharded<MLPStacked>("dp=2");
    cut(eager, me);
    cut(model, me);
    const auto eager_opt = optimizer_of(Kind::AdamW, *eager), opt = optimizer_of(Kind::AdamW, *model);
    auto compiled = compile(kStep, {.codegen = false, .verified = true});
    for (int i = 0; i < 8; i++) {
      const auto& x = data[static_cast<size_t>(me.rank)][static_cast<size_t>(i)];
      if (i == 4) {
        fsdp_module(*eager).set_reshard_after_forward(false);
        fsdp_module(*model).set_reshard_after_forward(false);
      }
      kStep(eager, *eager_opt, x);
      if (i % 2)
        kStep(model, *opt, x);
      else
        compiled(model, *opt, x);
      expect_equal_bits(*model, *eager);
    }
    Collectives seen;
    const comm::ObserverScope observe(&seen);
    compiled(model, *opt, data[0][0]);
    EXPECT_EQ(seen.seen.size(), 6u) << c10::Join("\n", seen.seen);  // each unit is gathered once
  });
}

TEST(CompiledFsdp, AnErrorInTheStepLeavesEverythingAsItWas) {
  const MLPStacked start(3);
  const auto x = torch::randn({4, 10});
  for (const int where : {0, 1, 2}) {
    SCOPED_TRACE(where);
    run_ranks(2, [&](Rank& me) {
      auto eager = clone(start), model = clone(start);
      const auto cut = fully_sharded<MLPStacked>("dp=2");
      cut(eager, me);
      cut(model, me);
      const auto eager_opt = optimizer_of(Kind::SGD, *eager), opt = optimizer_of(Kind::SGD, *model);
      const auto no_sync = [](MLPStacked& m, const at::Tensor& batch) {  // leaves whole gradients in the units
        fsdp_module(*m).set_requires_gradient_sync(false);
        loss_of(m, batch).backward();
        fsdp_module(*m).set_requires_gradient_sync(true);
      };
      if (where == 0)
        register_forward_hook(*model->layers[1], [](torch::nn::Module&, const Tensors&, const Tensors& outputs) {
          if (compiling()) (void)outputs[0].sum().item();
        });
      no_sync(eager, x);
      no_sync(model, x);
      auto broken = compile([&](MLPStacked& m, optim::Optimizer& o, const at::Tensor& batch) {
        auto loss = loss_of(m, batch);
        if (where == 1) (void)loss.item<double>();
        loss.backward();
        o.step();
        (void)loss.item<double>();
        return loss;
      });
      EXPECT_ERROR(UsageError, broken(model, *opt, x), "depends on values");
      for (const auto& p : model->parameters()) EXPECT_FALSE(p.grad().defined());
      kStep(eager, *eager_opt, x);
      kStep(model, *opt, x);
      expect_equal_bits(*model, *eager);
    });
  }
}

TEST(CompiledFsdp, WhatCannotBeCompiledSaysSo) {
  const MLPStacked start(2);
  const auto x = torch::randn({4, 10});
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    auto alone = compile(model);
    EXPECT_ERROR(UsageError, alone(x), "cannot be compiled by itself", "compile(step)");
    auto step = compile([](MLPStacked& m, const at::Tensor& batch) { return m(batch).sum(); });
    fsdp_module(*model).unshard();
    EXPECT_ERROR(UsageError, step(model, x), "is whole before the compiled step", "reshard()");
    fsdp_module(*model).reshard();
    const auto found = step(model, x);
    EXPECT_TRUE(at::equal(found, model(x).sum().detach()));
    EXPECT_ERROR(UsageError, step(model, x), "is whole before the compiled step");  // that forward's backward may come
  });
}

// ---- passes

std::map<std::string, int> kinds_of(const std::vector<std::string>& lines) {
  std::map<std::string, int> kinds;
  for (const auto& line : lines) {
    const auto begin = line.find(' ') + 1;
    kinds[line.substr(begin, line.find(' ', begin) - begin)]++;
  }
  return kinds;
}

// Fewer collectives, and the losses stay.
template <class Model>
void expect_fewer(const Model& start, const Cut<Model>& cut, const PassList& passes) {
  std::vector<Tensors> data(2);
  for (auto& own : data)
    for (int i = 0; i < 20; i++) own.push_back(batch_for(start, 4));
  run_ranks(2, [&](Rank& me) {
    auto eager = clone(start), model = clone(start);
    cut(eager, me);
    cut(model, me);
    const auto eager_opt = optimizer_of(Kind::SGD, *eager), opt = optimizer_of(Kind::SGD, *model);
    auto compiled = compile(Step<Model>(train<Model>), {.passes = passes, .codegen = false, .verified = true});
    for (int i = 0; i < 20; i++) {
      const auto& x = data[static_cast<size_t>(me.rank)][static_cast<size_t>(i)];
      Collectives by_eager, by_program;
      const auto wanted = [&] {
        const comm::ObserverScope observe(&by_eager);
        return train(eager, *eager_opt, x).template item<double>();
      }();
      const auto found = [&] {
        const comm::ObserverScope observe(&by_program);
        return compiled(model, *opt, x).template item<double>();
      }();
      EXPECT_NEAR(found, wanted, 1e-5 * std::abs(wanted)) << i;
      if (i < 19) continue;
      const auto eager_kinds = kinds_of(by_eager.seen), kinds = kinds_of(by_program.seen);
      ASSERT_EQ(kinds.size(), eager_kinds.size());
      for (const auto& [kind, times] : kinds) EXPECT_LT(times, eager_kinds.at(kind)) << kind;
    }
    for (const auto& each : compiled.cache().last().report())
      EXPECT_TRUE(each.matched.times > 0 || !each.name.starts_with("bucket_")) << each.name;
  });
}

TEST(CompiledFsdp, BucketsAndPrefetch) {
  const FSDPOptions lazy{.forward_prefetch = false, .backward_prefetch = BackwardPrefetch::None};
  const PassList passes{"bucket_all_gathers", "bucket_reduce_scatters"};
  expect_fewer(MLPStacked(3), fully_sharded<MLPStacked>("dp=2"), passes);
  expect_fewer(MLPStacked(3), flat<MLPStacked>("dp=2", lazy), passes);
  expect_fewer(GPT2(kGpt), fully_sharded<GPT2>("dp=2"), passes);
}

// As early as the eager schedule has them, where nothing was asked for.
TEST(CompiledFsdp, PrefetchIsTheSchedulesOrder) {
  const auto x = torch::randn({4, 10});
  const MLPStacked start(4);
  run_ranks(2, [&](Rank& me) {
    auto lazy = clone(start), ahead = clone(start);
    flat<MLPStacked>("dp=2", {.forward_prefetch = false, .backward_prefetch = BackwardPrefetch::None})(lazy, me);
    flat<MLPStacked>("dp=2")(ahead, me);
    const auto lazy_opt = optimizer_of(Kind::SGD, *lazy), opt = optimizer_of(Kind::SGD, *ahead);
    kStep(ahead, *opt, x);
    auto compiled = compile(kStep, {.passes = PassList{"prefetch_all_gathers"}, .codegen = false, .verified = true});
    compiled(lazy, *lazy_opt, x);
    Collectives found, wanted;
    {
      const comm::ObserverScope observe(&found);
      compiled(lazy, *lazy_opt, x);
    }
    const comm::ObserverScope observe(&wanted);
    kStep(ahead, *opt, x);
    EXPECT_EQ(found.seen, wanted.seen);
  });
}

// Values that lie beside the shard when the step is traced, because a load or materialize has put them there.
TEST(CompiledFsdp, TakesValuesThatWerePutBesideTheShard) {
  std::vector<Tensors> data(2);
  for (auto& own : data)
    for (int i = 0; i < kSteps; i++) own.push_back(torch::randn({4, 10}));
  const MLPStacked start(2);
  run_ranks(2, [&](Rank& me) {
    auto eager = clone(start), model = clone(start);
    for (auto* each : {&eager, &model}) fully_sharded<MLPStacked>("dp=2")(*each, me);
    const auto eager_opt = optimizer_of(Kind::AdamW, *eager), opt = optimizer_of(Kind::AdamW, *model);
    auto compiled = compile(kStep, {.codegen = false, .verified = true});
    for (int i = 0; i < kSteps; i++) {
      if (i == 0 || i == 3)
        for (const auto& each : {eager, model})
          for (auto& p : each->parameters()) p.set_data(p.detach() * 0.5);
      const auto& x = data[static_cast<size_t>(me.rank)][static_cast<size_t>(i)];
      const auto wanted = kStep(eager, *eager_opt, x).detach();
      ASSERT_TRUE(at::equal(compiled(model, *opt, x), wanted)) << "loss " << i;
      expect_equal_bits(*model, *eager);
    }
  });
}

}  // namespace
}  // namespace tessera
