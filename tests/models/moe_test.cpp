#include "tessera/models/detail/moe.h"

#include "tessera/base/error.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/sizes.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>

namespace tessera::models {
namespace {

using comm::CommKind;
using tessera::testing::close;
using tessera::testing::Rank;
using tessera::testing::run_ranks;

constexpr tessera::testing::Tolerance kClose{1e-9, 1e-9};
constexpr int64_t kDim = 6, kFfn = 10;

MoE make_moe(const MoEConfig& config) {
  torch::manual_seed(11);
  MoE moe(kDim, kFfn, config);
  moe->to(torch::kDouble);
  for (const auto& p : moe->parameters()) p.data().mul_(20);  // decided routers, results far from 0
  return moe;
}

at::Tensor some_tokens(int64_t count, double frequency = 0.37) {
  return torch::arange(count * kDim, torch::kDouble).mul(frequency).sin().view({1, count, kDim});
}

// The definition, token by token: the weighted sum of the top_k experts with the largest probabilities.
at::Tensor dense_reference(const MoE& moe, const at::Tensor& x) {
  const MoEConfig& config = moe->config;
  std::vector<at::Tensor> results;
  for (const at::Tensor& token : x.flatten(0, -2).unbind(0)) {
    const at::Tensor probabilities = torch::matmul(moe->gate->weight, token).softmax(0);
    const auto [weights, chosen] = probabilities.topk(config.top_k);
    at::Tensor y = torch::zeros_like(token);
    for (int64_t i = 0; i < config.top_k; ++i) {
      const int64_t e = chosen[i].item<int64_t>();
      const at::Tensor h = torch::silu(torch::matmul(moe->w1[e], token)) * torch::matmul(moe->w3[e], token);
      y = y + torch::matmul(moe->w2[e], h) * (weights[i] / weights.sum());
    }
    if (config.n_shared_experts > 0) {
      const at::Tensor h =
          torch::silu(torch::matmul(moe->shared_w1->weight, token)) * torch::matmul(moe->shared_w3->weight, token);
      y = y + torch::matmul(moe->shared_w2->weight, h);
    }
    results.push_back(y);
  }
  return torch::stack(results).view(x.sizes());
}

at::Tensor weighted_sum(const at::Tensor& y) {
  return (y * torch::arange(y.numel(), torch::kDouble).cos().view(y.sizes())).sum();
}

TEST(MoE, EqualsTheDenseComputationTokenForToken) {
  for (const MoEConfig& config : {MoEConfig{.n_experts = 5, .top_k = 2, .aux_loss_weight = 0},
                                  MoEConfig{.n_experts = 3, .top_k = 1, .n_shared_experts = 2, .aux_loss_weight = 0},
                                  MoEConfig{.n_experts = 4, .top_k = 4, .aux_loss_weight = 0}}) {
    MoE moe = make_moe(config);
    const at::Tensor x = some_tokens(13).requires_grad_();
    const at::Tensor expected = dense_reference(moe, x);
    std::vector<at::Tensor> inputs = moe->parameters();
    inputs.push_back(x);
    const auto expected_gradients = torch::autograd::grad({weighted_sum(expected)}, inputs);
    const at::Tensor found = moe(x);
    EXPECT_EQ(close(found, expected, kClose), "");
    EXPECT_EQ(close(torch::autograd::grad({weighted_sum(found)}, inputs), expected_gradients, kClose), "");
  }
}

// Every rank has other tokens, and other numbers of tokens per expert.
void expect_experts_like_one_rank(int64_t n, const std::string& backend) {
  SCOPED_TRACE(backend);
  const MoEConfig config{.n_experts = 4, .top_k = 2, .n_shared_experts = 1, .aux_loss_weight = 0.1};
  run_ranks(n,
            [&](Rank& me) {
              const auto tokens_of = [&](int64_t rank) { return some_tokens(7 + 2 * rank, 0.37 + 0.2 * rank); };
              static std::mutex generator;  // ranks are threads and share LibTorch's
              const auto build = [&] {
                const std::lock_guard lock(generator);
                return make_moe(config);
              };
              MoE plain = build(), moe = build();
              std::vector<at::Tensor> outputs;
              for (int64_t rank = 0; rank < n; ++rank) {  // the gradients of all ranks' tokens
                outputs.push_back(plain(tokens_of(rank)));
                weighted_sum(outputs.back()).backward();
              }

              moe->expert_parallel(me.mesh({n}, {"ep"}));
              EXPECT_EQ(to_string(DTensor(moe->w1).placements()), "[S(0)]");
              at::Tensor y;
              {
                CommDebugMode forward;
                y = moe(tokens_of(me.rank));
                EXPECT_EQ(forward.get_comm_counts().of(CommKind::AllToAllSingle), 3);
                EXPECT_EQ(forward.get_comm_counts().total(), 3);
              }
              EXPECT_EQ(close(y, outputs[me.rank], kClose), "");
              {
                CommDebugMode backward;
                weighted_sum(y).backward();
                EXPECT_EQ(backward.get_comm_counts().of(CommKind::AllToAllSingle), 1);  // the input needs no gradient
              }
              for (const auto& item : moe->named_parameters()) {
                at::Tensor gradient = item.value().grad();
                if (is_dtensor(gradient)) {
                  gradient = DTensor(gradient).full_tensor();
                } else {
                  gradient = gradient.contiguous();
                  me.group()->all_reduce(gradient, ReduceOp::Sum).wait();
                }
                EXPECT_EQ(close(gradient, get_parameter(*plain, item.key()).grad(), kClose), "") << item.key();
              }
            },
            {.backend = backend});
}

TEST(MoE, ExpertParallelismEqualsOneRank) {
  for (const int64_t n : {1, 2, 4}) expect_experts_like_one_rank(n, "threads");
  for (const char* backend : {"shm", "gloo"}) expect_experts_like_one_rank(2, backend);
}

TEST(MoE, CapacityDropsTheLastTokensOfAnExpert) {
  MoE moe = make_moe({.n_experts = 4, .top_k = 1, .capacity_factor = 1, .aux_loss_weight = 0});
  const at::Tensor same = some_tokens(1).expand({1, 8, kDim}).contiguous();  // all choose one expert, of capacity 2
  const at::Tensor y = moe(same);
  const at::Tensor expected = dense_reference(moe, same);
  EXPECT_EQ(close(y.narrow(1, 0, 2), expected.narrow(1, 0, 2), kClose), "");
  EXPECT_TRUE(y.narrow(1, 2, 6).eq(0).all().item<bool>());
  const RouterStatistics statistics = moe->statistics();
  EXPECT_EQ(statistics.dropped, 6);
  EXPECT_EQ(*std::ranges::max_element(statistics.tokens_per_expert), 8);
}

TEST(MoE, TheAuxiliaryLossIsPartOfTheGradient) {
  const MoEConfig config{.n_experts = 4, .top_k = 2, .aux_loss_weight = 0.5};
  MoE moe = make_moe(config);
  moe->aux_loss_scale = 0.25;
  const at::Tensor x = some_tokens(9);
  const Routing routing = route_tokens(moe->gate(x.flatten(0, 1)), {}, config);
  const auto expected = torch::autograd::grad({weighted_sum(dense_reference(moe, x)) + 0.5 * 0.25 * routing.aux_loss},
                                              {moe->gate->weight});
  const auto found = torch::autograd::grad({weighted_sum(moe(x))}, {moe->gate->weight});
  EXPECT_EQ(close(found, expected, kClose), "");
  EXPECT_NEAR(moe->statistics().aux_loss, routing.aux_loss.item<double>(), 1e-9);
  const at::Tensor uniform = torch::zeros({8, 4}, torch::kDouble);  // ties: the balanced loss is 1 for any choice
  EXPECT_NEAR(route_tokens(uniform, {}, config).aux_loss.item<double>(), 1, 1e-9);
}

TEST(MoE, BiasBalancesTheChoices) {
  MoE moe = make_moe({.n_experts = 4, .top_k = 1, .aux_loss_weight = 0, .bias_update_rate = 0.02});
  const at::Tensor x = some_tokens(64);
  const auto largest = [&] {
    moe(x);
    const RouterStatistics statistics = moe->statistics();
    return *std::ranges::max_element(statistics.tokens_per_expert);
  };
  const int64_t before = largest();
  moe->update_bias();
  for (int step = 0; step < 100; ++step) largest(), moe->update_bias();
  EXPECT_GT(before, 20);
  EXPECT_LT(largest(), 20);
  EXPECT_EQ(moe->statistics().tokens_per_expert.size(), 4);
}

TEST(Mixtral, ExpertAndTensorParallelModelEqualsOneRank) {
  const LlamaConfig config{.vocab_size = 24,
                           .max_seq_len = 8,
                           .n_layers = 2,
                           .n_heads = 4,
                           .n_kv_heads = 2,
                           .dim = 16,
                           .ffn_dim = 12,
                           .rope_theta = 10000,
                           .moe = {.n_experts = 4}};
  torch::manual_seed(5);
  Llama plain(config);
  EXPECT_EQ(parameter_count(config), [&] {
    int64_t count = 0;
    for (const auto& p : plain->parameters()) count += p.numel();
    return count;
  }());
  plain->to(torch::kDouble);
  const auto tokens_of = [](int64_t rank) { return torch::arange(16).mul(7 + 2 * rank).remainder(24).view({2, 8}); };
  std::vector<at::Tensor> losses;
  for (int64_t rank = 0; rank < 2; ++rank) {
    losses.push_back(loss(plain(tokens_of(rank)), tokens_of(rank + 1)));
    losses.back().backward();
  }
  for (const std::string axes : {"ep=2", "ep=2,tp=2", "ep=2,tp=2,sequence"}) {
    SCOPED_TRACE(axes);
    const bool sequence = axes.ends_with("sequence"), tp = axes != "ep=2";
    run_ranks(tp ? 4 : 2, [&](Rank& me) {
      const auto mesh = me.mesh(tp ? "ep=2,tp=2" : "ep=2");
      Llama model = clone(plain);
      model->zero_grad();
      expert_parallel(model, mesh["ep"]);
      if (tp)
        parallelize_module(model, mesh["tp"], tensor_parallel_plan(config, {.sequence_parallel = sequence}),
                           {.src_data_rank = std::nullopt});
      const int64_t rank = mesh.get_local_rank("ep");
      const at::Tensor found = loss(model(tokens_of(rank)), tokens_of(rank + 1));
      EXPECT_NEAR(found.item<double>(), losses[rank].item<double>(), 1e-9);
      found.backward();
      for (const std::string name : {"layers.0.moe.w1", "layers.1.moe.w2"})
        EXPECT_EQ(close(DTensor(get_parameter(*model, name).grad()).full_tensor(), get_parameter(*plain, name).grad(),
                        kClose),
                  "")
            << name;
      EXPECT_EQ(router_statistics(model).size(), 2);
      update_expert_bias(model, mesh.get_group("ep"));
      EXPECT_EQ(router_statistics(model)[0].tokens_per_expert, std::vector<int64_t>(4, 0));
    });
  }
}

TEST(Mixtral, ExpertParallelErrors) {
  run_ranks(3, [](Rank& me) {
    const auto mesh = me.mesh({3}, {"ep"});
    MoE moe = MoE(kDim, kFfn, MoEConfig{.n_experts = 4});
    EXPECT_ERROR(UsageError, moe->expert_parallel(mesh), "4 experts", "3 ranks", "multiple");
    EXPECT_FALSE(is_dtensor(moe->w1));
    Llama dense(LlamaConfig{
        .vocab_size = 8, .max_seq_len = 4, .n_layers = 1, .n_heads = 2, .n_kv_heads = 2, .dim = 8, .ffn_dim = 8});
    EXPECT_ERROR(UsageError, expert_parallel(dense, mesh), "no experts", "n_experts");
  });
}

}  // namespace
}  // namespace tessera::models
