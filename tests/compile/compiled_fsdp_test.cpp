// Compiled steps with FSDP modules: losses, parameters and gradients are bitwise equal to eager, with the same
// collectives.
#include "tessera/comm/detail/records.h"
#include "tessera/compile/api/compile.h"
#include "tessera/data_parallel/fsdp/detail/api/clip_grad.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/dtensor/random.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/models/mlp.h"
#include "tessera/models/sizes.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/nn/hooks.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include "tessera/tracing/detail/compiling_scope.h"
#include "tests/fixtures/fsdp.h"
#include "train_step.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>

namespace tessera {
namespace {

using fixtures::flat_sharded;
using fixtures::fully_sharded;
using fixtures::kTinyGPT2;
using fixtures::ShardFn;
using models::GPT2;
using models::MLPStacked;
using testing::Rank;
using testing::run_ranks;

at::Tensor batch_for(const MLPStacked&, int64_t rows) { return torch::randn({rows, 10}); }
at::Tensor batch_for(const GPT2&, int64_t rows) {
  return torch::randint(kTinyGPT2.vocab_size, {rows, 7}, torch::kLong);
}

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
const Step<MLPStacked> kMlpStep = train<MLPStacked>;

// ---- comparison of eager and compiled

// The collectives that this thread posts. The size of gradient reductions is left out: eager ones also carry one flag
// per parameter. An all-reduce of int is left out: in eager mode ranks ask whether a kept unsharded buffer is current.
struct Collectives : comm::Observer {
  std::vector<std::string> seen;
  void on_post(const comm::Record& record) override {
    const bool reduces = record.kind == comm::CommKind::ReduceScatterTensor || record.kind == comm::CommKind::AllReduce;
    if (record.kind == comm::CommKind::AllReduce && record.dtype == at::kInt) return;
    if (record.counted()) seen.push_back(c10::str(record.group, " ", record.kind, " ", reduces ? 0 : record.bytes));
  }
  std::vector<std::string> sorted() const {
    auto lines = seen;
    std::sort(lines.begin(), lines.end());
    return lines;
  }
};

enum class OptimizerKind { SGD, AdamW };
std::unique_ptr<optim::Optimizer> optimizer_of(OptimizerKind kind, const torch::nn::Module& model) {
  if (kind == OptimizerKind::SGD)
    return std::make_unique<optim::SGD>(model.parameters(), optim::SGDOptions{.lr = 0.1, .momentum = 0.9});
  return std::make_unique<optim::AdamW>(model.parameters(), optim::AdamWOptions{.lr = 0.01, .fused = true});
}

constexpr int kSteps = 5;

// By rank, one batch per step.
template <class Model>
std::vector<Tensors> batches_per_rank(const Model& model, int64_t ranks, int steps) {
  std::vector<Tensors> data(static_cast<size_t>(ranks));
  for (auto& batches : data)
    for (int i = 0; i < steps; i++) batches.push_back(batch_for(model, 4));
  return data;
}

// Two sharded copies of a model, each with its optimizer: one is trained in eager mode, one compiled.
template <class Model>
struct EagerAndCompiled {
  EagerAndCompiled(const Model& start, const ShardFn<Model>& shard, OptimizerKind kind, Rank& me)
      : eager(clone(start)), model(clone(start)) {
    shard(eager, me);
    shard(model, me);
    eager_opt = optimizer_of(kind, *eager);
    opt = optimizer_of(kind, *model);
  }
  Model eager, model;
  std::unique_ptr<optim::Optimizer> eager_opt, opt;
};

// Trains two copies of a model on `ranks` ranks, one with the eager and one with the compiled step.
template <class Model>
void expect_same(OptimizerKind kind, int64_t ranks, const Model& start, const ShardFn<Model>& shard,
                 const Step<Model>& step = train<Model>, bool codegen = false) {
  const auto data = batches_per_rank(start, ranks, kSteps);
  run_ranks(ranks, [&](Rank& me) {
    EagerAndCompiled<Model> both(start, shard, kind, me);
    auto compiled = compile(step, {.codegen = codegen, .verified = true});
    for (int i = 0; i < kSteps; i++) {
      const auto& x = data[static_cast<size_t>(me.rank)][static_cast<size_t>(i)];
      Collectives by_eager, by_program;
      const auto wanted = [&] {
        const comm::ObserverScope observe(&by_eager);
        return step(both.eager, *both.eager_opt, x);
      }();
      const auto programs = compiled.cache().size();
      const auto found = [&] {
        const comm::ObserverScope observe(&by_program);
        return compiled(both.model, *both.opt, x);
      }();
      ASSERT_TRUE(at::equal(found, wanted.detach())) << "loss " << i;
      expect_equal_bits(*both.model, *both.eager);
      // The call that compiles posts more: the ranks compare their programs.
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
    const auto shard = fully_sharded<MLPStacked>(c10::str("dp=", ranks));
    expect_same(OptimizerKind::SGD, ranks, start, shard);
    expect_same(OptimizerKind::AdamW, ranks, start, shard);
  }
}

TEST(CompiledFsdp, FlatParameters) {
  const MLPStacked start(3);
  for (const int64_t ranks : {1, 2, 4})
    for (const bool use_orig_params : {false, true}) {
      SCOPED_TRACE(c10::str(ranks, " ranks, use_orig_params ", use_orig_params));
      const auto shard = flat_sharded<MLPStacked>(c10::str("dp=", ranks), {.use_orig_params = use_orig_params});
      expect_same(OptimizerKind::AdamW, ranks, start, shard);
    }
}

TEST(CompiledFsdp, ShardingStrategiesAndPolicies) {
  const MLPStacked start(3);
  using S = ShardingStrategy;
  const auto hybrid = "replicate=2,shard=2";
  const auto by_columns = [](const at::Tensor& p) { return std::optional<int64_t>(p.dim() - 1); };
  const MixedPrecisionPolicy bf16{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  struct Case {
    const char* name;
    int64_t ranks;
    ShardFn<MLPStacked> shard;
  };
  const Case cases[] = {
      {"no reshard after forward", 2, fully_sharded<MLPStacked>("dp=2", {.reshard_after_forward = false})},
      {"reshard to 2 ranks after forward", 4, fully_sharded<MLPStacked>("dp=4", {.reshard_after_forward = 2})},
      {"sharded by columns", 4, fully_sharded<MLPStacked>("dp=4", {.shard_placement_fn = by_columns})},
      {"HSDP", 4, fully_sharded<MLPStacked>(hybrid)},
      {"bfloat16", 2, fully_sharded<MLPStacked>("dp=2", {.mp_policy = bf16})},
      {"SHARD_GRAD_OP", 2, flat_sharded<MLPStacked>("dp=2", {.sharding_strategy = S::ShardGradOp})},
      {"NO_SHARD", 2, flat_sharded<MLPStacked>("dp=2", {.sharding_strategy = S::NoShard})},
      {"HYBRID_SHARD", 4,
       flat_sharded<MLPStacked>(hybrid, {.sharding_strategy = S::HybridShard, .use_orig_params = true})},
      {"flat, bfloat16", 2, flat_sharded<MLPStacked>("dp=2", {.mixed_precision = {.param_dtype = at::kBFloat16}})},
      {"no prefetch", 2,
       flat_sharded<MLPStacked>("dp=2", {.forward_prefetch = false, .backward_prefetch = BackwardPrefetch::None})},
  };
  for (const auto& [name, ranks, shard] : cases) {
    SCOPED_TRACE(name);
    expect_same(OptimizerKind::AdamW, ranks, start, shard);
  }
}

// Backward does not reshard. The next step still all-gathers, because the optimizer has changed the parameters.
TEST(CompiledFsdp, NoReshardAfterBackward) {
  const auto shard = [](MLPStacked& model, Rank& me) {
    fully_sharded<MLPStacked>("dp=2")(model, me);
    fsdp_module(*model).set_reshard_after_backward(false);
  };
  expect_same(OptimizerKind::AdamW, 2, MLPStacked(3), ShardFn<MLPStacked>(shard));
}

TEST(CompiledFsdp, GptWithTensorParallelism) {
  GPT2 start(kTinyGPT2);
  const ShardFn<GPT2> shard = [](GPT2& model, Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    parallelize_module(model, mesh["tp"], models::tensor_parallel_plan(kTinyGPT2));
    for (auto& block : model->h) fully_shard(block, {.mesh = mesh["dp"]});
    fully_shard(model, {.mesh = mesh["dp"]});
  };
  expect_same(OptimizerKind::AdamW, 4, start, shard);
  expect_same(OptimizerKind::AdamW, 2, start, flat_sharded<GPT2>("dp=2", {.use_orig_params = true}));
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
  expect_same(OptimizerKind::SGD, 4, start, fully_sharded<MLPStacked>("replicate=2,shard=2"), step);
  expect_same(OptimizerKind::SGD, 2, start, flat_sharded<MLPStacked>("dp=2"), step);
}

// ---- gradient accumulation

// Unsharded gradients accumulate within one step.
TEST(CompiledFsdp, GradientAccumulationInOneStep) {
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
  expect_same(OptimizerKind::SGD, 2, start, fully_sharded<MLPStacked>("dp=2"), step);
  expect_same(OptimizerKind::SGD, 4, start, fully_sharded<MLPStacked>("replicate=2,shard=2"), step);
}

// Gradients accumulate over three compiled calls, unsharded or reduced; the third call runs the optimizer.
void expect_same_over_calls(const ShardFn<MLPStacked>& shard, bool unsharded) {
  const MLPStacked start(3);
  const auto data = batches_per_rank(start, 2, 9);
  run_ranks(2, [&](Rank& me) {
    EagerAndCompiled<MLPStacked> both(start, shard, OptimizerKind::SGD, me);
    const auto step = [=](MLPStacked& m, optim::Optimizer& o, const at::Tensor& x, int part) {
      if (part == 0) o.zero_grad();
      if (unsharded) fsdp_module(*m).set_requires_gradient_sync(part == 2);
      auto loss = loss_of(m, x);
      loss.backward();
      if (part == 2) o.step();
      return loss;
    };
    auto compiled = compile(step, {.codegen = false, .verified = true});
    size_t programs = 0;
    for (int i = 0; i < 9; i++) {
      const auto& x = data[static_cast<size_t>(me.rank)][static_cast<size_t>(i)];
      const auto wanted = step(both.eager, *both.eager_opt, x, i % 3);
      ASSERT_TRUE(at::equal(compiled(both.model, *both.opt, x, i % 3), wanted.detach())) << i;
      // In eager mode gradients that are not reduced are .grad; a program keeps them inside.
      if (!unsharded || i % 3 == 2) expect_equal_bits(*both.model, *both.eager);
      if (i == 5) programs = compiled.cache().size();
    }
    // The third round reuses the programs of the second. This is not so for reduced gradients: the program that adds to
    // them keeps them in use, so each round allocates new ones and compiles programs for those.
    if (unsharded) {
      EXPECT_EQ(compiled.cache().size(), programs);
    }
  });
}

TEST(CompiledFsdp, GradientAccumulationOverSeveralCalls) {
  expect_same_over_calls(fully_sharded<MLPStacked>("dp=2"), true);
  expect_same_over_calls(fully_sharded<MLPStacked>("dp=2"), false);
  expect_same_over_calls(flat_sharded<MLPStacked>("dp=2"), false);
}

// ---- state outside of the program

// Compiled and eager steps alternate. A changed FSDP setting recompiles.
TEST(CompiledFsdp, MixesWithEagerSteps) {
  const MLPStacked start(3);
  const auto data = batches_per_rank(start, 2, 8);
  run_ranks(2, [&](Rank& me) {
    EagerAndCompiled<MLPStacked> both(start, fully_sharded<MLPStacked>("dp=2"), OptimizerKind::AdamW, me);
    auto &eager = both.eager, &model = both.model;
    auto compiled = compile(kMlpStep, {.codegen = false, .verified = true});
    for (int i = 0; i < 8; i++) {
      const auto& x = data[static_cast<size_t>(me.rank)][static_cast<size_t>(i)];
      if (i == 4) {
        fsdp_module(*eager).set_reshard_after_forward(false);
        fsdp_module(*model).set_reshard_after_forward(false);
      }
      kMlpStep(eager, *both.eager_opt, x);
      if (i % 2)
        kMlpStep(model, *both.opt, x);
      else
        compiled(model, *both.opt, x);
      expect_equal_bits(*model, *eager);
    }
    Collectives seen;
    const comm::ObserverScope observe(&seen);
    compiled(model, *both.opt, data[0][0]);
    EXPECT_EQ(seen.seen.size(), 6u) << c10::Join("\n", seen.seen);  // one all-gather and one reduce-scatter per unit
  });
}

TEST(CompiledFsdp, FailedTraceIsUndone) {
  const MLPStacked start(3);
  const auto x = torch::randn({4, 10});
  for (const int where : {0, 1, 2}) {
    SCOPED_TRACE(where);
    run_ranks(2, [&](Rank& me) {
      EagerAndCompiled<MLPStacked> both(start, fully_sharded<MLPStacked>("dp=2"), OptimizerKind::SGD, me);
      auto &eager = both.eager, &model = both.model;
      const auto no_sync = [](MLPStacked& m, const at::Tensor& batch) {  // leaves unsharded gradients in the units
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
      EXPECT_ERROR(UsageError, broken(model, *both.opt, x), "depends on values");
      for (const auto& p : model->parameters()) EXPECT_FALSE(is_dtensor(p.grad()));  // unsharded, as before
      kMlpStep(eager, *both.eager_opt, x);
      kMlpStep(model, *both.opt, x);
      expect_equal_bits(*model, *eager);
    });
  }
}

TEST(CompiledFsdp, UnsupportedCases) {
  const MLPStacked start(2);
  const auto x = torch::randn({4, 10});
  run_ranks(2, [&](Rank& me) {
    const CompileScope strict({.numerics = Numerics::Strict});  // equal bits
    auto model = clone(start);
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    auto alone = compile(model);
    EXPECT_ERROR(UsageError, alone(x), "cannot be compiled by itself", "compile(step)");
    auto step = compile([](MLPStacked& m, const at::Tensor& batch) { return m(batch).sum(); });
    fsdp_module(*model).unshard();
    EXPECT_ERROR(UsageError, step(model, x), "is unsharded before the compiled step", "reshard()");
    fsdp_module(*model).reshard();
    const auto found = step(model, x);
    EXPECT_TRUE(at::equal(found, model(x).sum().detach()));
    // The eager forward left it unsharded for its backward.
    EXPECT_ERROR(UsageError, step(model, x), "is unsharded before the compiled step");
  });
}

// ---- passes

// How many collectives of each kind.
std::map<std::string, int> kinds_of(const std::vector<std::string>& lines) {
  std::map<std::string, int> kinds;
  for (const auto& line : lines) {
    const auto begin = line.find(' ') + 1;
    kinds[line.substr(begin, line.find(' ', begin) - begin)]++;
  }
  return kinds;
}

// With these passes the program posts fewer collectives of each kind, and the losses stay the same.
template <class Model>
void expect_fewer(const Model& start, const ShardFn<Model>& shard, const PassList& passes) {
  const auto data = batches_per_rank(start, 2, 20);
  run_ranks(2, [&](Rank& me) {
    EagerAndCompiled<Model> both(start, shard, OptimizerKind::SGD, me);
    auto compiled = compile(Step<Model>(train<Model>), {.passes = passes, .codegen = false, .verified = true});
    for (int i = 0; i < 20; i++) {
      const auto& x = data[static_cast<size_t>(me.rank)][static_cast<size_t>(i)];
      Collectives by_eager, by_program;
      const auto wanted = [&] {
        const comm::ObserverScope observe(&by_eager);
        return train(both.eager, *both.eager_opt, x).template item<double>();
      }();
      const auto found = [&] {
        const comm::ObserverScope observe(&by_program);
        return compiled(both.model, *both.opt, x).template item<double>();
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

TEST(CompiledFsdp, BucketingPassesMergeCollectives) {
  const FSDPOptions lazy{.forward_prefetch = false, .backward_prefetch = BackwardPrefetch::None};
  const PassList passes{"bucket_all_gathers", "bucket_reduce_scatters"};
  expect_fewer(MLPStacked(3), fully_sharded<MLPStacked>("dp=2"), passes);
  expect_fewer(MLPStacked(3), flat_sharded<MLPStacked>("dp=2", lazy), passes);
  expect_fewer(GPT2(kTinyGPT2), fully_sharded<GPT2>("dp=2"), passes);
}

// Without FSDP's own prefetching, the pass gives the order that eager prefetching has.
TEST(CompiledFsdp, PrefetchPassEqualsEagerPrefetch) {
  const auto x = torch::randn({4, 10});
  const MLPStacked start(4);
  run_ranks(2, [&](Rank& me) {
    auto lazy = clone(start), ahead = clone(start);
    const FSDPOptions no_prefetch{.forward_prefetch = false, .backward_prefetch = BackwardPrefetch::None};
    flat_sharded<MLPStacked>("dp=2", no_prefetch)(lazy, me);
    flat_sharded<MLPStacked>("dp=2")(ahead, me);
    const auto lazy_opt = optimizer_of(OptimizerKind::SGD, *lazy), opt = optimizer_of(OptimizerKind::SGD, *ahead);
    kMlpStep(ahead, *opt, x);
    auto compiled = compile(kMlpStep, {.passes = PassList{"prefetch_all_gathers"}, .codegen = false, .verified = true});
    compiled(lazy, *lazy_opt, x);
    Collectives found, wanted;
    {
      const comm::ObserverScope observe(&found);
      compiled(lazy, *lazy_opt, x);
    }
    const comm::ObserverScope observe(&wanted);
    kMlpStep(ahead, *opt, x);
    EXPECT_EQ(found.seen, wanted.seen);
  });
}

// set_data, as in loading a state dict, gives a parameter new memory outside of the unit's buffer before tracing.
TEST(CompiledFsdp, ParametersReplacedBySetData) {
  const MLPStacked start(2);
  const auto data = batches_per_rank(start, 2, kSteps);
  run_ranks(2, [&](Rank& me) {
    EagerAndCompiled<MLPStacked> both(start, fully_sharded<MLPStacked>("dp=2"), OptimizerKind::AdamW, me);
    auto &eager = both.eager, &model = both.model;
    auto compiled = compile(kMlpStep, {.codegen = false, .verified = true});
    for (int i = 0; i < kSteps; i++) {
      if (i == 0 || i == 3)
        for (const auto& each : {eager, model})
          for (auto& p : each->parameters()) p.set_data(p.detach() * 0.5);
      const auto& x = data[static_cast<size_t>(me.rank)][static_cast<size_t>(i)];
      const auto wanted = kMlpStep(eager, *both.eager_opt, x).detach();
      ASSERT_TRUE(at::equal(compiled(model, *both.opt, x), wanted)) << "loss " << i;
      expect_equal_bits(*model, *eager);
    }
  });
}

}  // namespace
}  // namespace tessera
