#include "tessera/tensor_parallel/context_parallel.h"

#include "tessera/base/error.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/sizes.h"
#include "tessera/tensor_parallel/detail/block_attention.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <optional>

namespace tessera {
namespace {

using comm::CommKind;
using testing::Rank;
using testing::run_ranks;

struct ContextCase {
  const char* name;
  ContextParallelOptions options;
  bool causal = true;
};
const std::vector<ContextCase>& context_cases() {
  static const std::vector<ContextCase> cases = {
      {"all-gather, zigzag", {}},
      {"all-gather, unbalanced", {.load_balance = LoadBalance::None}},
      {"all-gather, not causal", {}, false},
      {"all-to-all, zigzag", {.rotate = RotateMethod::AllToAll}},
      {"all-to-all, unbalanced", {.rotate = RotateMethod::AllToAll, .load_balance = LoadBalance::None}},
      {"all-to-all, not causal", {.rotate = RotateMethod::AllToAll}, false},
      {"Ulysses", {.method = ContextMethod::Ulysses}},
      {"Ulysses, not causal", {.method = ContextMethod::Ulysses}, false},
  };
  return cases;
}

// Values that do not depend on the rank and its generator.
torch::Tensor waves(at::IntArrayRef sizes, double frequency) {
  const int64_t count = c10::multiply_integers(sizes);
  return torch::arange(count, torch::kDouble).mul(frequency).sin().view(sizes).mul(2);
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                  const std::optional<at::Tensor>& mask = {}) {
  return at::scaled_dot_product_attention(q, k, v, mask, 0.0, causal);
}

// The result and the gradients of attention on all tokens.
std::vector<at::Tensor> attention_on_one_rank(std::vector<at::Tensor> qkv, const at::Tensor& weights, bool causal,
                                              const std::optional<at::Tensor>& mask = {}) {
  for (at::Tensor& x : qkv) x = x.clone().requires_grad_();
  const at::Tensor out = attend(qkv[0], qkv[1], qkv[2], causal, mask);
  (out * weights).sum().backward();
  return {out.detach(), qkv[0].grad(), qkv[1].grad(), qkv[2].grad()};
}

std::vector<at::Tensor> context_parallel_attention_of(const DeviceMesh& mesh, const ContextParallelOptions& options,
                                                      std::vector<at::Tensor> qkv, const at::Tensor& weights,
                                                      bool causal) {
  at::Tensor out;
  std::vector<at::Tensor> results;
  const ContextParallel context(mesh, options);
  for (at::Tensor& x : qkv) x = context.shard(x, 2).requires_grad_();
  out = attend(qkv[0], qkv[1], qkv[2], causal);
  (out * context.shard(weights, 2)).sum().backward();
  for (const at::Tensor& x : {out.detach(), qkv[0].grad(), qkv[1].grad(), qkv[2].grad()})
    results.push_back(context.unshard(x, 2));
  return results;
}

TEST(ContextParallel, EqualsOneRank) {
  const std::vector<at::Tensor> qkv = {waves({2, 4, 16, 6}, 0.7), waves({2, 4, 16, 6}, 1.1), waves({2, 4, 16, 6}, 1.9)};
  const at::Tensor weights = waves({2, 4, 16, 6}, 0.3);
  for (const int64_t n : {1, 2, 4})
    for (const ContextCase& each : context_cases()) {
      SCOPED_TRACE(::testing::Message() << each.name << " on " << n);
      const std::vector<at::Tensor> expected = attention_on_one_rank(qkv, weights, each.causal);
      run_ranks(n, [&](Rank& me) {
        const auto found = context_parallel_attention_of(me.mesh({n}, {"cp"}), each.options, qkv, weights, each.causal);
        EXPECT_EQ(testing::close(found, expected, {1e-9, 1e-9}), "") << each.name << " rank " << me.rank;
      });
    }
}

// Longer causal blocks are computed in parts. The tokens come first in memory in half of the cases, as models have
// them.
TEST(ContextParallel, LongCausalBlocks) {
  for (const int64_t tokens : {127, 128, 130, 256, 258, 512, 1032})
    for (const bool tokens_first : {false, true}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens" << (tokens_first ? ", first in memory" : ""));
      const auto make = [&](double frequency) {
        return tokens_first ? waves({2, tokens, 3, 8}, frequency).transpose(1, 2) : waves({2, 3, tokens, 8}, frequency);
      };
      const std::vector<at::Tensor> qkv = {make(0.7), make(1.1), make(1.9)};
      const at::Tensor weights = make(0.3);
      const std::vector<at::Tensor> expected = attention_on_one_rank(qkv, weights, /*causal=*/true);
      const double scale = 1 / std::sqrt(8.0);
      for (const auto dtype : {at::kDouble, at::kBFloat16}) {
        const at::Tensor q = qkv[0].to(dtype), k = qkv[1].to(dtype), v = qkv[2].to(dtype);
        const BlockResult result = block_attention(q, k, v, {.causal = true}, scale);
        const BlockGradients found =
            block_attention_backward(weights.to(dtype), q, k, v, result, {.causal = true}, scale);
        const double tolerance = dtype == at::kDouble ? 1e-10 : 0.1;  // the inputs are rounded
        std::vector<at::Tensor> all = {result.out, found.q, found.k, found.v};
        for (at::Tensor& x : all) x = x.to(at::kDouble);
        EXPECT_EQ(testing::close(all, expected, {tolerance, tolerance}), "") << dtype;
      }
    }
}

TEST(ContextParallel, CollectiveCounts) {
  const int64_t n = 4;
  run_ranks(n, [&](Rank& me) {
    const auto mesh = me.mesh({n}, {"cp"});
    for (const ContextCase& each : context_cases()) {
      SCOPED_TRACE(each.name);
      const ContextParallel context(mesh, each.options);
      std::vector<at::Tensor> qkv;
      for (const double frequency : {0.7, 1.1, 1.9})
        qkv.push_back(context.shard(waves({1, 4, 16, 6}, frequency), 2).requires_grad_());
      struct Counts {
        int64_t all_gather, reduce_scatter, all_to_all;
        bool operator==(const Counts&) const = default;
      };
      const auto counted = [](const CommDebugMode& mode) {
        const auto& counts = mode.get_comm_counts();
        return Counts{counts.of(CommKind::AllGatherIntoTensor), counts.of(CommKind::ReduceScatterTensor),
                      counts.of(CommKind::AllToAllSingle)};
      };
      at::Tensor out;
      const bool ulysses = each.options.method == ContextMethod::Ulysses;
      const bool rotates = each.options.rotate == RotateMethod::AllToAll;
      {
        CommDebugMode forward;
        out = attend(qkv[0], qkv[1], qkv[2], each.causal);
        EXPECT_EQ(counted(forward), ulysses ? (Counts{0, 0, 2}) : rotates ? (Counts{0, 0, n - 1}) : (Counts{1, 0, 0}));
      }
      CommDebugMode backward;
      out.sum().backward();
      EXPECT_EQ(counted(backward), ulysses   ? (Counts{0, 0, 2})
                                   : rotates ? (Counts{0, 0, 2 * n - 1})
                                             : (Counts{1, 1, 0}));
    }
  });
}

// A token attends only to earlier tokens of its document. Documents end inside of the parts of ranks.
TEST(ContextParallel, Documents) {
  const std::vector<at::Tensor> qkv = {waves({2, 2, 16, 6}, 0.7), waves({2, 2, 16, 6}, 1.1), waves({2, 2, 16, 6}, 1.9)};
  const at::Tensor weights = waves({2, 2, 16, 6}, 0.3);
  const at::Tensor shared = torch::tensor({0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2});
  const at::Tensor per_sample = torch::stack({shared, torch::arange(16).div(3, "floor")});
  for (const at::Tensor& documents : {shared, per_sample})
    for (const bool causal : {true, false}) {
      at::Tensor mask = documents.unsqueeze(-1) == documents.unsqueeze(-2);
      if (causal) mask = mask.tril();
      if (mask.dim() == 3) mask = mask.unsqueeze(1);
      const std::vector<at::Tensor> expected = attention_on_one_rank(qkv, weights, false, mask);
      for (const RotateMethod rotate : {RotateMethod::AllGather, RotateMethod::AllToAll})
        for (const LoadBalance balance : {LoadBalance::None, LoadBalance::HeadTail})
          run_ranks(2, [&](Rank& me) {
            const auto mesh = me.mesh({2}, {"cp"});
            ContextParallelOptions options{.rotate = rotate, .load_balance = balance};
            options.documents = ContextParallel(mesh, options).shard(documents, -1);
            const auto found = context_parallel_attention_of(mesh, options, qkv, weights, causal);
            EXPECT_EQ(testing::close(found, expected, {1e-9, 1e-9}), "") << "rank " << me.rank;
          });
    }
}

// Heads are sharded over tp, as DTensors, in grad mode and in inference mode.
TEST(ContextParallel, DTensorsAndInferenceMode) {
  const std::vector<at::Tensor> qkv = {waves({2, 4, 16, 6}, 0.7), waves({2, 4, 16, 6}, 1.1), waves({2, 4, 16, 6}, 1.9)};
  const at::Tensor weights = waves({2, 4, 16, 6}, 0.3);
  const std::vector<at::Tensor> expected = attention_on_one_rank(qkv, weights, true);
  for (const ContextParallelOptions& options :
       {ContextParallelOptions{}, ContextParallelOptions{.rotate = RotateMethod::AllToAll},
        ContextParallelOptions{.method = ContextMethod::Ulysses}})
    run_ranks(4, [&](Rank& me) {
      const auto mesh = me.mesh("cp=2,tp=2");
      const ContextParallel context(mesh["cp"], options);
      std::vector<at::Tensor> mine;
      for (const at::Tensor& x : qkv)
        mine.push_back(distribute_tensor(context.shard(x, 2), mesh["tp"], {Shard(1)}).requires_grad_());
      const at::Tensor out = attend(mine[0], mine[1], mine[2], true);
      EXPECT_EQ(to_string(DTensor(out).placements()), "[S(1)]");
      (out * distribute_tensor(context.shard(weights, 2), mesh["tp"], {Shard(1)})).sum().backward();
      const auto full = [&](const at::Tensor& x) {
        return context.unshard(DTensor(x.detach()).full_tensor().contiguous(), 2);
      };
      EXPECT_EQ(testing::close({full(out), full(mine[0].grad()), full(mine[1].grad()), full(mine[2].grad())}, expected,
                               {1e-9, 1e-9}),
                "");
      const c10::InferenceMode inference;
      std::vector<at::Tensor> plain;
      for (const at::Tensor& x : qkv) plain.push_back(context.shard(x, 2));
      EXPECT_EQ(
          testing::close(context.unshard(attend(plain[0], plain[1], plain[2], true), 2), expected[0], {1e-9, 1e-9}),
          "");
      const at::Tensor over_tokens = distribute_tensor(plain[0], mesh["tp"], {Shard(2)});
      EXPECT_ERROR(UsageError, attend(over_tokens, over_tokens, over_tokens, true), "[S(2)]", "such as S(1)");
    });
}

// Losses and gradients of a model on cp x tp ranks are those of one rank.
template <class Model, class Config>
void expect_model_like_one_rank(const Config& config, const std::string& axes, int64_t ranks,
                                const ContextParallelOptions& options) {
  SCOPED_TRACE(axes);
  const at::Tensor tokens = torch::arange(32).mul(7).remainder(config.vocab_size).view({2, 16});
  const at::Tensor targets = torch::arange(32).mul(5).remainder(config.vocab_size).view({2, 16});
  torch::manual_seed(5);
  Model plain(config);
  plain->to(torch::kDouble);
  const at::Tensor expected = models::loss(plain(tokens), targets);
  expected.backward();
  run_ranks(ranks, [&](Rank& me) {
    const auto mesh = me.mesh(axes);
    Model model = clone(plain);
    model->zero_grad();
    if (mesh.ndim() > 1)
      parallelize_module(model, mesh["tp"], models::tensor_parallel_plan(config), {.src_data_rank = std::nullopt});
    const ContextParallel context(mesh["cp"], options);
    at::Tensor loss = models::loss(model(context.shard(tokens, 1)), context.shard(targets, 1));
    loss.backward();
    at::Tensor mean = loss.detach().clone();
    mesh.get_group("cp")->all_reduce(mean, ReduceOp::Avg).wait();
    EXPECT_NEAR(mean.item<double>(), expected.item<double>(), 1e-9);
    for (const auto& item : model->named_parameters()) {
      at::Tensor gradient = item.value().grad();
      gradient = (is_dtensor(gradient) ? DTensor(gradient).full_tensor() : gradient).contiguous();
      mesh.get_group("cp")->all_reduce(gradient, ReduceOp::Avg).wait();
      EXPECT_EQ(testing::close(gradient, get_parameter(*plain, item.key()).grad(), {1e-9, 1e-9}), "") << item.key();
    }
  });
}

TEST(ContextParallel, ModelsHaveTheLossesAndGradientsOfOneRank) {
  const models::GPT2Config gpt{.vocab_size = 24, .max_seq_len = 16, .n_layer = 2, .n_head = 4, .n_embd = 16};
  const models::LlamaConfig llama{.vocab_size = 24,
                                  .max_seq_len = 16,
                                  .n_layers = 2,
                                  .n_heads = 4,
                                  .n_kv_heads = 2,
                                  .dim = 16,
                                  .ffn_dim = 24,
                                  .rope_theta = 10000};
  for (const ContextParallelOptions& options :
       {ContextParallelOptions{}, ContextParallelOptions{.rotate = RotateMethod::AllToAll},
        ContextParallelOptions{.method = ContextMethod::Ulysses}})
    for (const auto& [axes, ranks] : std::vector<std::pair<std::string, int64_t>>{{"cp=2", 2}, {"cp=2,tp=2", 4}}) {
      expect_model_like_one_rank<models::GPT2>(gpt, axes, ranks, options);
      expect_model_like_one_rank<models::Llama>(llama, axes, ranks, options);
    }
}

TEST(ContextParallel, ShardAndPositions) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh({2}, {"cp"});
    EXPECT_TRUE(sequence_positions(3, at::kCPU).equal(torch::arange(3)));
    EXPECT_EQ(sequence_length(3), 3);
    const ContextParallel outer(mesh);
    const at::Tensor zigzag = me.rank == 0 ? torch::tensor({0, 1, 6, 7}) : torch::tensor({2, 3, 4, 5});
    EXPECT_TRUE(sequence_positions(4, at::kCPU).equal(zigzag));
    EXPECT_EQ(sequence_length(4), 8);
    EXPECT_TRUE(outer.shard(torch::arange(8), 0).equal(zigzag));
    {
      const ContextParallel inner(mesh, {.load_balance = LoadBalance::None});
      EXPECT_TRUE(inner.shard(torch::arange(8), -1).equal(torch::arange(4) + 4 * me.rank));
    }
    EXPECT_TRUE(outer.unshard(zigzag, -1).equal(torch::arange(8)));  // the outer scope is back
    EXPECT_TRUE(sequence_positions(4, at::kCPU).equal(zigzag));
  });
}

TEST(ContextParallel, Errors) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh({2}, {"cp"});
    EXPECT_ERROR(UsageError,
                 ContextParallel(mesh, {.method = ContextMethod::Ulysses, .load_balance = LoadBalance::HeadTail}),
                 "Ulysses", "LoadBalance::None");
    const ContextParallel context(mesh);
    EXPECT_ERROR(UsageError, context.shard(torch::zeros({3, 6}), 1), "6 tokens", "multiple of 4", "Pad", "8");
    const at::Tensor x = torch::zeros({1, 3, 4, 2});
    EXPECT_ERROR(UsageError, at::scaled_dot_product_attention(x, x, x, {}, 0.5), "dropout_p", "Write 0");
    EXPECT_ERROR(UsageError, at::scaled_dot_product_attention(x, x, x, torch::ones({4, 4}, torch::kBool)), "attn_mask",
                 "documents");
    EXPECT_ERROR(UsageError, attend(x, torch::zeros({1, 3, 5, 2}), x, false), "as many keys as queries");
    EXPECT_ERROR(UsageError, attend(x.narrow(2, 0, 3), x.narrow(2, 0, 3), x.narrow(2, 0, 3), true), "even number");
    const ContextParallel ulysses(mesh, {.method = ContextMethod::Ulysses});
    EXPECT_ERROR(UsageError, attend(x, x, x, true), "3 heads", "2 ranks", "ContextMethod::Ring");
  });
}

// Runs code in the scope of a ContextParallel, on tokens x (B, t, C) of this rank.
using OnTokens = std::function<at::Tensor(const at::Tensor& x)>;
struct TokenCase {
  const char* name;
  OnTokens run;
};
void run_in_scope(const std::vector<TokenCase>& cases,
                  const std::function<void(Rank&, const std::function<void()>&)>& expect) {
  const at::Tensor full = waves({2, 16, 8}, 0.7);
  for (const TokenCase& each : cases)
    run_ranks(2, [&](Rank& me) {
      SCOPED_TRACE(each.name);
      const auto mesh = me.mesh({2}, {"cp"});
      for (const char* mode : {"grad", "no_grad", "inference"}) {
        SCOPED_TRACE(mode);
        const std::string name = mode;
        std::optional<at::NoGradGuard> no_grad;
        std::optional<c10::InferenceMode> inference;
        if (name == "no_grad") no_grad.emplace();
        if (name == "inference") inference.emplace();
        const ContextParallel context(mesh);
        expect(me, [&] { each.run(context.shard(full, 1).requires_grad_(name == "grad")); });
      }
    });
}

template <class Module>
Module of_double(Module module) {
  module->to(torch::kDouble);
  return module;
}

// Such an op would see the tokens of one rank only, without an error.
TEST(ContextParallel, OpsThatMixTokensAreRefused) {
  namespace tn = torch::nn;
  namespace F = torch::nn::functional;
  const auto time_first = [](const at::Tensor& x) { return x.transpose(0, 1); };
  const std::vector<TokenCase> cases = {
      {"MultiheadAttention",
       [=](const auto& x) {
         auto attention = of_double(tn::MultiheadAttention(8, 2));
         return std::get<0>(attention(time_first(x), time_first(x), time_first(x)));
       }},
      {"MultiheadAttention with a mask, not contiguous, after a Linear",
       [=](const auto& x) {
         auto attention = of_double(tn::MultiheadAttention(tn::MultiheadAttentionOptions(8, 4).bias(false)));
         const auto y = time_first(of_double(tn::Linear(8, 8))(x).relu() + x);
         return std::get<0>(attention(y, y, y, at::Tensor(), false, at::zeros({8, 8}, at::kDouble)));
       }},
      {"TransformerEncoderLayer",
       [=](const auto& x) { return of_double(tn::TransformerEncoderLayer(8, 2))(time_first(x)); }},
      {"TransformerDecoderLayer",
       [=](const auto& x) { return of_double(tn::TransformerDecoderLayer(8, 2))(time_first(x), time_first(x)); }},
      {"Transformer",
       [=](const auto& x) {
         return of_double(tn::Transformer(tn::TransformerOptions(8, 2, 1, 1)))(time_first(x), time_first(x));
       }},
      {"product and softmax", [](const auto& x) { return (x.matmul(x.transpose(1, 2))).softmax(-1).matmul(x); }},
      {"product by einsum, of heads",
       [](const auto& x) {
         const auto h = x.view({2, 8, 2, 4});
         return torch::einsum("bihd,bjhd->bhij", {h, h});
       }},
      {"one sequence", [](const auto& x) { return x[0].mm(x[0].t()); }},
      {"after dropout, norm, residual, cat and index",
       [](const auto& x) {
         auto y = torch::cat({at::layer_norm(x, {8}) + x, at::dropout(x, 0.5, true)}, -1);
         y = y.flatten(0, 1).index({torch::arange(16)}).view({2, 8, 16}).contiguous();
         return y.bmm(y.transpose(1, 2));
       }},
      {"embedding of token ids",
       [](const auto& x) {
         const auto y = torch::embedding(waves({4, 6}, 1.3), x.select(-1, 0).gt(0).to(at::kLong));
         return y.bmm(y.mT());
       }},
      {"linear attention", [](const auto& x) { return x.matmul(x.transpose(1, 2).matmul(x)); }},
      {"MLP-Mixer", [](const auto& x) { return of_double(tn::Linear(8, 3))(x.transpose(1, 2)); }},
      {"softmax over the sequence", [](const auto& x) { return x.softmax(1); }},
      {"cumsum", [](const auto& x) { return x.cumsum(1); }},
      {"flip", [](const auto& x) { return x.flip({1}); }},
      {"roll", [](const auto& x) { return x.roll({1}, {1}); }},
      {"topk of tokens", [](const auto& x) { return std::get<0>(x.topk(2, 1)); }},
      {"token shift",
       [](const auto& x) {
         return F::pad(x, F::PadFuncOptions({0, 0, 1, 0})).narrow(1, 0, 8);
       }},
      {"norm over the sequence",
       [](const auto& x) {
         return at::layer_norm(x, {8, 8});
       }},
      {"GroupNorm", [](const auto& x) { return of_double(tn::GroupNorm(2, 8))(x.transpose(1, 2)); }},
      {"Conv1d", [](const auto& x) { return of_double(tn::Conv1d(8, 4, 3))(x.transpose(1, 2)); }},
      {"AvgPool1d", [](const auto& x) { return at::avg_pool1d(x.transpose(1, 2), {2}); }},
      {"fft", [](const auto& x) { return at::fft_fft(x, {}, 1); }},
      {"LSTM",
       [](const auto& x) { return std::get<0>(of_double(tn::LSTM(tn::LSTMOptions(8, 4).batch_first(true)))(x)); }},
      {"GRU", [=](const auto& x) { return std::get<0>(of_double(tn::GRU(8, 4))(time_first(x))); }},
      {"RNN", [=](const auto& x) { return std::get<0>(of_double(tn::RNN(8, 4))(time_first(x))); }},
      {"attention of unknown tensors",
       [](const auto&) {
         const auto q = waves({2, 8, 6}, 0.3);
         return q.bmm(q.transpose(1, 2)).mul(0.5).softmax(-1);
       }},
  };
  run_in_scope(cases, [](Rank&, const std::function<void()>& run) {
    EXPECT_ERROR(UsageError, run(), "in a ContextParallel", "scaled_dot_product_attention", "check_ops = false");
  });
}

// The ops of a transformer but attention treat each token alone. Statistics are those of this rank, as the loss is.
TEST(ContextParallel, OpsOnSingleTokensRun) {
  namespace tn = torch::nn;
  const std::vector<TokenCase> cases = {
      {"block",
       [](const auto& x) {
         auto qkv = of_double(tn::Linear(8, 24))(at::layer_norm(x, {8})).view({2, 8, 3, 2, 4}).permute({2, 0, 3, 1, 4});
         const auto y = attend(qkv[0], qkv[1], qkv[2], true).transpose(1, 2).reshape({2, 8, 8});
         auto h = x + of_double(tn::Linear(tn::LinearOptions(8, 8).bias(false)))(y);
         h = h + of_double(tn::Linear(32, 8))(at::gelu(of_double(tn::Linear(8, 32))(h)));
         return at::nll_loss(at::log_softmax(h.flatten(0, 1), -1), torch::arange(16).remainder(8));
       }},
      {"softmax, sort, scan and flip over features",
       [](const auto& x) { return std::get<0>(x.softmax(-1).cumsum(2).flip({2}).sort(-1)).roll({1}, {2}); }},
      {"the same after a transposition",
       [](const auto& x) {
         return x.transpose(0, 1).contiguous().view({16, 8}).softmax(-1).view({8, 2, 8}).softmax(1);
       }},
      {"attention of heads",
       [](const auto& x) {
         const auto h = x.view({16, 2, 4});
         return h.bmm(h.transpose(1, 2)).softmax(-1).bmm(h);
       }},
      {"attention to a memory",
       [](const auto& x) {
         const auto memory = waves({2, 5, 8}, 1.1);
         return x.bmm(memory.transpose(1, 2)).softmax(-1).bmm(memory);
       }},
      {"router",
       [](const auto& x) {
         const auto scores = x.view({16, 8}).mm(waves({8, 4}, 0.9)).softmax(-1);
         const auto [weight, expert] = scores.topk(2, -1);
         const auto order = expert.flatten().argsort();
         const auto counts = torch::one_hot(expert, 4).sum(at::IntArrayRef{0, 1});
         return x.view({16, 8}).index_select(0, order.div(2, "floor")).sum() + weight.sum() + counts.sum();
       }},
      {"convolution of single tokens", [](const auto& x) { return of_double(tn::Conv1d(8, 4, 1))(x.transpose(1, 2)); }},
      {"pool of features", [](const auto& x) { return at::avg_pool1d(x, {2}); }},
      {"mean of the sequence",
       [](const auto& x) {
         return x.mean(1).mm(waves({8, 8}, 0.2)).softmax(-1);
       }},
  };
  run_in_scope(cases, [](Rank&, const std::function<void()>& run) { EXPECT_NO_THROW(run()); });
}

TEST(ContextParallel, ChecksOfOpsCanBeTurnedOff) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh({2}, {"cp"});
    const auto x = waves({2, 16, 8}, 0.7);
    const auto product = [](const at::Tensor& x) { return x.bmm(x.transpose(1, 2)).softmax(-1); };
    {
      const ContextParallel context(mesh, {.check_ops = false});
      EXPECT_NO_THROW(product(context.shard(x, 1)));
    }
    at::Tensor local;
    {
      const ContextParallel context(mesh);
      local = context.shard(x, 1).requires_grad_();
      const at::Tensor y = attend(local.unsqueeze(1), local.unsqueeze(1), local.unsqueeze(1), true);
      y.sum().backward();  // not checked
      EXPECT_ERROR(UsageError, product(y.squeeze(1)), "multiplies the tokens of a sequence with each other");
    }
    EXPECT_NO_THROW(product(local));  // outside of the scope
    const ContextParallel one(me.mesh({2, 1}, {"dp", "cp"})["cp"]);
    EXPECT_NO_THROW(product(one.shard(x, 1)));  // one rank has all tokens
  });
}

}  // namespace
}  // namespace tessera
