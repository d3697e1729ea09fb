#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/state_dict.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/mlp.h"
#include "tessera/models/sizes.h"
#include "tessera/state/load_state_dict.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/models/small_models.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::models {
namespace {

using test::kGpt;
using test::kLlama;
using testing::close;
using testing::error_message;
using testing::Rank;
using testing::run_ranks;

template <class Config>
Config with(Config config, void (*change)(Config&)) {
  change(config);
  return config;
}

int64_t count(const torch::nn::Module& module) {
  int64_t n = 0;
  for (const auto& p : module.parameters()) n += p.numel();
  return n;
}

torch::Tensor random_tokens(int64_t vocab) { return torch::randint(vocab, {4, 6}, torch::kLong); }

template <class Model, class Config>
void expect_parameter_count(const Config& config) {
  EXPECT_EQ(count(*Model(config)), parameter_count(config)) << config;
}

TEST(Models, ParameterCountMatchesTheModule) {
  expect_parameter_count<GPT2>(kGpt);
  expect_parameter_count<GPT2>(with<GPT2Config>(kGpt, [](auto& c) { c.bias = false; }));
  expect_parameter_count<Llama>(kLlama);
  expect_parameter_count<Llama>(with<LlamaConfig>(kLlama, [](auto& c) { c.tied = true; }));
  for (const char* name : {"gpt-tiny", "llama-tiny"}) {
    const auto config = find_config(name);
    if (const auto* gpt = std::get_if<GPT2Config>(&config))
      expect_parameter_count<GPT2>(*gpt);
    else
      expect_parameter_count<Llama>(std::get<LlamaConfig>(config));
  }
}

// Position 500 has an angle of 500 radians, which bfloat16 rounds by up to one.
TEST(Models, MixedPrecisionDoesNotRoundTheAnglesOfLlama) {
  auto config = kLlama;
  config.max_seq_len = 512;
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh({2}, {"dp"});
    torch::manual_seed(1);
    Llama model(config), expected(config);
    load_state_dict(*expected, get_model_state_dict(*model));
    expected->to(torch::kBFloat16);
    const FullyShardOptions options{.mesh = mesh, .mp_policy = {.param_dtype = torch::kBFloat16}};
    for (auto& layer : model->layers) fully_shard(layer, options);
    fully_shard(model, options);
    const auto tokens = torch::arange(512).remainder(config.vocab_size).unsqueeze(0);
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(model(tokens), expected(tokens)));
  });
}

TEST(Models, InitialWeightsHaveThePublishedStandardDeviations) {
  torch::manual_seed(1);
  GPT2 gpt(with<GPT2Config>(kGpt, [](auto& c) { c.n_embd = 192; }));
  EXPECT_NEAR(gpt->wte->weight.std().item<double>(), 0.02, 0.001);
  EXPECT_NEAR(gpt->h[0]->attn->c_attn->weight.std().item<double>(), 0.02, 0.001);
  EXPECT_NEAR(gpt->h[1]->mlp->c_proj->weight.std().item<double>(), 0.01, 0.0005);  // 0.02 / sqrt(2 x 2)
  EXPECT_EQ(gpt->h[1]->mlp->c_fc->bias.abs().sum().item<double>(), 0);
  Llama llama(with<LlamaConfig>(kLlama, [](auto& c) { c.dim = 192; }));
  EXPECT_NEAR(llama->layers[0]->attention->wq->weight.std().item<double>(), 0.02, 0.001);
  EXPECT_NEAR(llama->layers[0]->attention->wo->weight.std().item<double>(), 0.01, 0.0005);
  EXPECT_NEAR(llama->output->weight.std().item<double>(), 0.02, 0.001);
}

// Training the clone must not change the original.
template <class Model, class Input>
void expect_clones(Model model, const Input& input) {
  model->eval();
  const auto before = model(input).detach().clone();
  auto copy = clone(model);
  EXPECT_EQ(state_dict(*copy).names(), state_dict(*model).names());
  EXPECT_TRUE(copy(input).equal(before));
  EXPECT_FALSE(copy->is_training());
  torch::optim::SGD optimizer(copy->parameters(), 0.5);
  copy(input).pow(2).sum().backward();
  optimizer.step();
  EXPECT_FALSE(copy(input).equal(before));
  EXPECT_TRUE(model(input).equal(before));
  for (const auto& p : model->parameters()) EXPECT_FALSE(p.grad().defined());
}

TEST(Models, ClonesAreIndependent) {
  torch::manual_seed(2);
  expect_clones(GPT2(kGpt), random_tokens(24));
  expect_clones(Llama(kLlama), random_tokens(24));
  expect_clones(Llama(with<LlamaConfig>(kLlama, [](auto& c) { c.tied = true; })), random_tokens(24));
  expect_clones(MLP(mlp_module()), torch::randn({3, 10}));
  expect_clones(MLPStacked(3), torch::randn({3, 10}));
}

template <class Model>
void expect_learns(Model model) {
  const auto tokens = random_tokens(24), targets = random_tokens(24);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  double first = 0, last = 0;
  for (int step = 0; step < 10; step++) {
    optimizer.zero_grad();
    const auto value = loss(model(tokens), targets);
    value.backward();
    optimizer.step();
    last = value.template item<double>();
    if (step == 0) first = last;
  }
  EXPECT_NEAR(first, std::log(24), 0.2);  // a uniform prediction
  EXPECT_LT(last, 0.7 * first);
}

TEST(Models, LossDecreasesInTraining) {
  torch::manual_seed(3);
  expect_learns(GPT2(with<GPT2Config>(kGpt, [](auto& c) { c.dropout = 0.1; })));
  expect_learns(Llama(kLlama));
}

TEST(Models, DropoutIsActiveOnlyInTraining) {
  torch::manual_seed(4);
  GPT2 model(with<GPT2Config>(kGpt, [](auto& c) { c.dropout = 0.5; }));
  const auto tokens = random_tokens(24);
  EXPECT_FALSE(model(tokens).equal(model(tokens)));
  model->eval();
  EXPECT_TRUE(model(tokens).equal(model(tokens)));
}

TEST(Models, InvalidInputsThrow) {
  GPT2 gpt(kGpt);
  Llama llama(kLlama);
  const auto tokens = torch::zeros({1, 9}, torch::kLong);
  EXPECT_CONTAINS(error_message<UsageError>([&] { gpt(tokens); }), "the sequence has 9 tokens, but max_seq_len is 8");
  EXPECT_CONTAINS(error_message<UsageError>([&] { llama(tokens); }), "the sequence has 9 tokens, but max_seq_len is 8");
  EXPECT_CONTAINS(error_message<UsageError>([&] { gpt(tokens[0]); }), "takes tokens (B, T); found sizes [9]");
  EXPECT_CONTAINS(error_message<UsageError>([&] {
                    loss(torch::ones({2, 3, 4}), tokens);
                  }),
                  "found sizes [2, 3, 4] and [1, 9]");
  EXPECT_CONTAINS(error_message<UsageError>([&] {
                    MLP(MLPConfig{{{"a", 2, 3}, {"b", 4, 5}}});
                  }),
                  "a returns 3 features, but b takes 4");
}

// The placement of the parameters whose names have this suffix, on the mesh axis "tp". Others are replicated.
struct SuffixPlacement {
  std::string suffix;
  Placement placement;
};
template <class Model>
void distribute(Model& model, const DeviceMesh& mesh, const std::vector<SuffixPlacement>& shardings) {
  for (const auto& item : model->named_parameters()) {
    Placement placement = Replicate();
    for (const auto& sharding : shardings)
      if (item.key().ends_with(sharding.suffix)) placement = sharding.placement;
    auto p = item.value();
    distribute_in_place(p, mesh, {placement});
  }
}

const std::vector<SuffixPlacement> kGptShardings{
    {"c_attn.weight", StridedShard(0, 3)},
    {"c_attn.bias", StridedShard(0, 3)},
    {"attn.c_proj.weight", Shard(1)},
    {"c_fc.weight", Shard(0)},
    {"c_fc.bias", Shard(0)},
    {"mlp.c_proj.weight", Shard(1)},
    {"wte.weight", Shard(0)},
};
const std::vector<SuffixPlacement> kLlamaShardings{
    {"wq.weight", Shard(0)}, {"wk.weight", Shard(0)}, {"wv.weight", Shard(0)}, {"wo.weight", Shard(1)},
    {"w1.weight", Shard(0)}, {"w3.weight", Shard(0)}, {"w2.weight", Shard(1)}, {"output.weight", Shard(0)},
};

// Runs the unmodified model on distributed parameters and tokens. Forward communicates only the expected all-reduces.
template <class Model, class Config>
void expect_same_on(const std::vector<int64_t>& worlds, const Config& config,
                    const std::vector<SuffixPlacement>& shardings, int64_t forward_comms) {
  torch::manual_seed(5);
  Model reference(config);
  for (auto& p : reference->parameters()) {
    torch::NoGradGuard no_grad;
    p.uniform_(-0.4, 0.4);
  }
  const auto tokens = random_tokens(config.vocab_size), targets = random_tokens(config.vocab_size);
  const auto expected = loss(reference(tokens), targets);
  expected.backward();
  for (const auto n : worlds)
    run_ranks(n, [&](Rank& me) {
      const auto mesh = me.mesh(c10::str("tp=", me.size()));
      Model model(config);
      load_state_dict(*model, state_dict(*reference));
      distribute(model, mesh, shardings);
      const auto x = distribute_tensor(tokens, mesh), y = distribute_tensor(targets, mesh);
      CommDebugMode comms;
      const auto logits = model(x);
      EXPECT_EQ(comms.get_total_counts(), n == 1 ? 0 : forward_comms) << comms.get_comm_counts();
      const auto value = loss(logits, y);
      value.backward();
      EXPECT_EQ(close(DTensor(value).full_tensor(), expected.detach()), "");
      const auto gradients = reference->named_parameters();
      for (const auto& item : model->named_parameters())
        EXPECT_EQ(close(DTensor(item.value().grad()).full_tensor(), gradients[item.key()].grad(), {1e-4, 1e-5}), "")
            << item.key();
    });
}

TEST(Models, Gpt2OnDistributedTensorsHasTheSameGradients) {
  expect_same_on<GPT2>({1, 2, 3}, kGpt, kGptShardings, /*two per block, one for wte*/ 5);
}
TEST(Models, LlamaOnDistributedTensorsHasTheSameGradients) {
  expect_same_on<Llama>({1, 2, 3}, kLlama, kLlamaShardings, /*two per layer*/ 4);
}

// With plain tensors, local heads are a narrower c_attn, and the sum of the outputs of the ranks is the full output.
TEST(Models, AttentionInfersTheNumberOfHeads) {
  torch::manual_seed(6);
  torch::NoGradGuard no_grad;
  const auto x = torch::randn({2, 5, 24});
  const auto config = with<GPT2Config>(kGpt, [](auto& c) { c.bias = false; });
  GPT2Attention full(config);
  auto sum = torch::zeros_like(x);
  for (int64_t rank = 0; rank < 3; rank++) {
    GPT2Attention part(config);
    auto rows = full->c_attn->weight.view({3, 24, 24}).narrow(1, 8 * rank, 8);  // two heads of four
    part->c_attn->weight.set_data(rows.reshape({24, 24}));
    part->c_proj->weight.set_data(full->c_proj->weight.narrow(1, 8 * rank, 8));
    sum += part(x);
  }
  EXPECT_EQ(close(sum, full(x)), "");
}

// The weights equal those of Linear after manual_seed(5), in every layer.
TEST(MLP, SeededWeightsEqualThoseOfLinear) {
  MLP model(mlp_module());
  torch::manual_seed(5);
  torch::nn::Linear net1(10, 16), net2(16, 10);
  EXPECT_EQ(close(model->layers[0]->weight, net1->weight), "");
  EXPECT_EQ(close(model->layers[1]->bias, net2->bias), "");
  MLPStacked stacked;
  EXPECT_EQ(state_dict(*stacked).names()[5], "layers.1.net1.bias");
  EXPECT_TRUE(stacked->layers[1]->layers[0]->weight.equal(model->layers[0]->weight));
}

TEST(MLP, ConfigurationsHaveTheExpectedSizes) {
  EXPECT_EQ(MLP(simple_mlp())(torch::randn({3, 50})).sizes(), at::IntArrayRef({3, 8}));
  EXPECT_EQ(MLP(simple_model())(torch::randn({3, 5})).sizes(), at::IntArrayRef({3, 12}));
  EXPECT_EQ(count(*MLP(four_linears(20))), 4 * (400 + 20));
  EXPECT_EQ(state_dict(*MLP(mlp_module(/*bias=*/false))).names(),
            std::vector<std::string>({"net1.weight", "net2.weight"}));
}

}  // namespace
}  // namespace tessera::models
