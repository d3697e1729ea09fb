// check_parallel accepts right plans, and names the module and the change for wrong ones. The generator combines small
// models with random right plans, and then makes one mistake.
#include "fixtures/transformers.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/modules.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;

enum class SplitHeads { Right, GlobalHeads, FixedSizes };  // how the attention splits its local features into heads

// A transformer block. It is not Cloneable.
struct CheckedBlockImpl : torch::nn::Module {
  CheckedBlockImpl(int64_t heads, bool fused, SplitHeads split, double dropout)
      : heads(heads), fused(fused), split(split), dropout(dropout) {
    const int64_t d = heads * 4;
    norm1 = register_module("norm1", nn::LayerNorm(torch::nn::LayerNormOptions({d})));
    attention = fixtures::AttentionLinears(*this, d, fused);
    norm2 = register_module("norm2", nn::LayerNorm(torch::nn::LayerNormOptions({d})));
    mlp = register_module("mlp",
                          nn::Sequential(torch::nn::Linear(d, 2 * d), torch::nn::GELU(), torch::nn::Linear(2 * d, d)));
  }
  torch::Tensor forward(const torch::Tensor& input) {
    const auto b = input.size(0), t = input.size(1);
    const auto x = norm1(input);
    torch::Tensor q, k, v;
    if (fused) {
      const auto parts = attention.qkv(x).chunk(3, -1);
      q = parts[0], k = parts[1], v = parts[2];
    } else {
      q = attention.wq(x), k = attention.wk(x), v = attention.wv(x);
    }
    const auto by_head = [&](const torch::Tensor& y) {
      const auto split_heads = split == SplitHeads::Right         ? y.view({b, t, -1, 4})
                               : split == SplitHeads::GlobalHeads ? y.view({b, t, heads, -1})
                                                                  : y.view({b, t, heads, 4});
      return split_heads.transpose(1, 2);
    };
    const auto y = at::scaled_dot_product_attention(by_head(q), by_head(k), by_head(v), {}, dropout);
    const auto z = input + attention.wo(y.transpose(1, 2).flatten(2));
    return z + torch::dropout(mlp(norm2(z)), dropout, is_training());
  }
  int64_t heads;
  bool fused;
  SplitHeads split;
  double dropout;
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  fixtures::AttentionLinears attention;
  nn::Sequential mlp{nullptr};
};
TESSERA_MODULE(CheckedBlock);

struct CheckedModelImpl : torch::nn::Module {
  CheckedModelImpl(int64_t heads, bool fused, SplitHeads split, double dropout) {
    embed = register_module("embed", nn::Embedding(7, heads * 4));
    block = register_module("block", CheckedBlock(heads, fused, split, dropout));
    head = register_module("head", nn::Linear(heads * 4, 7));
    scale = register_buffer("scale", torch::ones({1}));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    scale.add_(0.5);  // a buffer that forward changes
    return head(block(embed(tokens)) * scale);
  }
  nn::Embedding embed{nullptr};
  CheckedBlock block{nullptr};
  nn::Linear head{nullptr};
  torch::Tensor scale;
};
TESSERA_MODULE(CheckedModel);

Plan right_plan(bool fused, bool embedding, bool vocabulary) {
  Plan plan;
  if (embedding) plan.add("embed", RowwiseParallel{.input_layouts = Replicate()});
  if (fused)
    plan.add("block.qkv", ColwiseParallel{.sections = 3});
  else
    plan.add("block.w[qkv]", ColwiseParallel());
  plan.add("block.wo", RowwiseParallel());
  plan.add("block.mlp.0", ColwiseParallel());
  plan.add("block.mlp.2", RowwiseParallel());
  if (vocabulary) plan.add("head", ColwiseParallel{.output_layouts = Replicate()});
  return plan;
}

Plan with_entry(const Plan& plan, const std::string& pattern, std::optional<Style> style) {
  Plan changed;
  bool found = false;
  for (const auto& entry : plan) {
    if (entry.pattern != pattern) {
      changed.add(entry.pattern, entry.style);
      continue;
    }
    found = true;
    if (style) changed.add(pattern, *style);
  }
  if (!found && style) changed.add(pattern, *style);
  return changed;
}

// A mistake in a right plan, or in the code of the model.
struct Mistake {
  const char* name;
  bool fused;
  SplitHeads split;
  const char* pattern;         // the entry that changes; null: none
  std::optional<Style> style;  // nullopt: without the entry
  const char* module;          // the one that must be named
  const char* advice;
};
const std::vector<Mistake>& mistakes() {
  static const auto* all = new std::vector<Mistake>{
      {"no sections", true, SplitHeads::Right, "block.qkv", ColwiseParallel(), "block.qkv", "add .sections = 3"},
      {"two sections", true, SplitHeads::Right, "block.qkv", ColwiseParallel{.sections = 2}, "block.qkv",
       "add .sections = 3"},
      {"global heads", true, SplitHeads::GlobalHeads, nullptr, {}, "block", "Write -1 for dim 2 and 4 for dim 3"},
      {"global heads of wq", false, SplitHeads::GlobalHeads, nullptr, {}, "block", "Write -1 for dim 2"},
      {"fixed sizes", false, SplitHeads::FixedSizes, nullptr, {}, "block", "is not possible"},
      {"no rowwise", false, SplitHeads::Right, "block.wo", {}, "block.wo", "{\"block.wo\", RowwiseParallel()}"},
      {"no rowwise in mlp", true, SplitHeads::Right, "block.mlp.2", {}, "block.mlp.2", "RowwiseParallel()"},
      {"no colwise", true, SplitHeads::Right, "block.mlp.0", {}, "block.mlp.2", ".input_layouts = Replicate()"},
      {"sequence output", true, SplitHeads::Right, "block.wo", RowwiseParallel{.output_layouts = Shard(1)}, "block.wo",
       ".output_layouts = Replicate()"},
      {"partial output", false, SplitHeads::Right, "block.mlp.2", RowwiseParallel{.output_layouts = Partial()},
       "block.mlp.2", ".output_layouts = Replicate()"},
      {"local logits", true, SplitHeads::Right, "head", ColwiseParallel(), "head", ".output_layouts = Replicate()"},
      {"not a fused weight", false, SplitHeads::Right, "block.mlp.0", ColwiseParallel{.sections = 2}, "block.mlp.0",
       "remove .sections"},
  };
  return *all;
}

// The state of a model and of the random numbers, to see that nothing has changed.
struct Untouched {
  explicit Untouched(CheckedModel& model) : model(model), random(random::state().offset) {
    for (auto& p : model->parameters()) p.mutable_grad() = torch::full_like(p, 2);
    for (const auto& p : model->parameters()) {
      memory.push_back(p.data_ptr());
      values.push_back(p.detach().clone());
    }
    for (const auto& m : model->modules()) modules.push_back(m.get());
    handle = model->head->weight.grad();
    hook = model->block.register_forward_hook([this](Module&, const Tensors&, const Tensors&) { hook_calls++; });
    hooks = hook_point(*model->block).hooks();
  }
  void expect() {
    const auto parameters = model->parameters();
    ASSERT_EQ(parameters.size(), memory.size());
    for (size_t i = 0; i < parameters.size(); i++) {
      ASSERT_FALSE(is_dtensor(parameters[i]));
      EXPECT_EQ(parameters[i].data_ptr(), memory[i]);
      EXPECT_TRUE(torch::equal(parameters[i], values[i]));
      EXPECT_TRUE(torch::equal(parameters[i].grad(), torch::full_like(values[i], 2)));
      EXPECT_TRUE(parameters[i].requires_grad());
    }
    EXPECT_TRUE(model->head->weight.grad().is_same(handle));
    EXPECT_EQ(model->scale.item<float>(), 1);
    EXPECT_EQ(random::state().offset, random);
    std::vector<Module*> now;
    for (const auto& m : model->modules()) now.push_back(m.get());
    EXPECT_EQ(now, modules);
    for (const auto& m : model->modules()) {
      if (!has_hook_point(*m)) continue;
      EXPECT_EQ(hook_point(*m).hooks(), m.get() == model->block.ptr().get() ? hooks : nullptr);
    }
    hook.remove();
    EXPECT_TRUE(hooks->empty());
  }
  CheckedModel& model;
  uint64_t random;
  std::vector<void*> memory;
  Tensors values;
  std::vector<Module*> modules;
  at::Tensor handle;
  HookHandle hook;
  const detail::ModuleHooks* hooks;
  int hook_calls = 0;
};

CheckedModel seeded_model(int64_t heads, bool fused, SplitHeads split, double dropout) {
  CheckedModel model(heads, fused, split, dropout);
  torch::NoGradGuard no_grad;
  const random::SeedScope seed(5);
  for (auto& p : model->parameters()) random::uniform_(p, -0.5, 0.5);
  return model;
}

TEST(CheckParallel, RightPlansAreAcceptedAndMistakesNamed) {
  std::mt19937 random(11);
  const auto pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  constexpr int kCases = 24;  // each mistake once
  for (int c = 0; c < kCases; c++) {
    const Mistake* mistake = c % 2 == 0 ? nullptr : &mistakes()[static_cast<size_t>(c / 2) % mistakes().size()];
    const int64_t ranks = pick(3) == 0 ? 4 : 2, heads = 4;
    const bool fused = mistake ? mistake->fused : pick(2) == 0;
    const auto split = mistake ? mistake->split : SplitHeads::Right;
    const double dropout = pick(2) == 0 ? 0.3 : 0;
    const bool training = pick(4) != 0;
    auto plan = right_plan(fused, pick(2) == 0, pick(2) == 0);
    if (mistake && mistake->pattern) plan = with_entry(plan, mistake->pattern, mistake->style);
    SCOPED_TRACE(c10::str("case ", c, " ", mistake ? mistake->name : "right", ", ", ranks, " ranks, dropout ", dropout,
                          "\n", plan));
    std::vector<std::string> said(static_cast<size_t>(ranks));
    run_ranks(ranks, [&](Rank& me) {
      auto model = seeded_model(heads, fused, split, dropout);
      model->train(training);
      const auto tokens = (torch::arange(10) * 3).remainder(7).view({2, 5});
      Untouched before(model);
      const auto mesh = me.mesh("tp=" + std::to_string(ranks));
      said[me.rank] = testing::error_message<UsageError>([&] { check_parallel(model, mesh, plan, tokens); });
      before.expect();
    });
    for (const auto& each : said) EXPECT_EQ(each, said[0]);  // the same error on all ranks
    if (!mistake) {
      EXPECT_EQ(said[0], "nothing was thrown");
      continue;
    }
    EXPECT_TRUE(said[0].starts_with(c10::str("check_parallel: module '", mistake->module, "': "))) << said[0];
    EXPECT_CONTAINS(said[0], mistake->advice);
  }
}

TEST(CheckParallel, DifferentValuesOnRanksAreNamed) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    auto model = seeded_model(4, true, SplitHeads::Right, 0);
    const auto tokens = torch::arange(10).remainder(7).view({2, 5});
    {
      torch::NoGradGuard no_grad;
      model->block->attention.qkv->weight.add_(
          static_cast<double>(me.rank));  // parallelize_module sends the values of rank 0
    }
    check_parallel(model, mesh, right_plan(true, true, true), tokens);
    EXPECT_ERROR(UsageError, check_parallel(model, mesh, right_plan(true, true, true), tokens + me.rank),
                 "equal on all", "input 0");
    {
      torch::NoGradGuard no_grad;
      model->block->norm1->weight.add_(static_cast<double>(me.rank));
    }
    EXPECT_ERROR(UsageError, check_parallel(model, mesh, right_plan(true, true, true), tokens), "'block.norm1.weight'",
                 "different values on the ranks");
  });
}

// A norm of a local sequence shard: the forward is right, but the gradients of its parameters are partial.
struct LocalNormImpl : torch::nn::Module {
  LocalNormImpl() {
    up = register_module("up", nn::Linear(4, 4));
    norm = register_module("norm", nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    down = register_module("down", nn::Linear(4, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) { return down(norm(up(x))); }
  nn::Linear up{nullptr}, down{nullptr};
  nn::LayerNorm norm{nullptr};
};
TESSERA_MODULE(LocalNorm);

TEST(CheckParallel, WrongGradientsOfARightForwardAreNamed) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    LocalNorm model;
    {
      torch::NoGradGuard no_grad;
      const random::SeedScope seed(5);
      for (auto& p : model->parameters()) random::uniform_(p, -0.5, 0.5);
    }
    const Plan plan{{"up", RowwiseParallel{.input_layouts = Replicate(), .output_layouts = Shard(1)}},
                    {"down", ColwiseParallel{.input_layouts = Shard(1), .output_layouts = Replicate()}}};
    const auto x = torch::linspace(-1, 1, 2 * 6 * 4).view({2, 6, 4}).sin();
    EXPECT_ERROR(UsageError, check_parallel(model, mesh, plan, x), "module 'norm'", "SequenceParallel()",
                 "the gradient of its");
    // A loss in `forward`, and the mesh of a scope.
    auto right = with_entry(plan, "norm", SequenceParallel());
    check_parallel(*model, mesh, right, {x}, [&](const Tensors& in) { return Tensors{model(in[0]).pow(2).mean()}; });
    const MeshScope scope(mesh);
    check_parallel(model, right, x);
    check_parallel(model, right, distribute_tensor(x, mesh, {Shard(1)}));
  });
}

}  // namespace
}  // namespace tessera
