#include "tessera/comm/detail/store/sha256.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/numerics/numerics.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/testing/ranks.h"
#include "tessera/tracing/op_mode.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <iostream>
#include <map>
#include <mutex>

namespace ts = tessera;

namespace {

struct GPTMesh {
  int64_t dp = 1, fsdp = 1, tp = 1;
  int64_t ranks() const { return dp * fsdp * tp; }
  std::string text() const { return c10::str("dp=", dp, ",fsdp=", fsdp, ",tp=", tp); }
};

const ts::models::GPT2Config kSmallGPT = {.vocab_size = 64, .max_seq_len = 12, .n_layer = 2, .n_head = 6, .n_embd = 48};

const ts::models::GPT2Config kWideGPT = {
    .vocab_size = 256, .max_seq_len = 64, .n_layer = 2, .n_head = 6, .n_embd = 192};

void copy_weights(const ts::models::GPT2& from, ts::models::GPT2& to) {
  const at::NoGradGuard no_grad;
  const auto values = from->parameters();
  auto parameters = to->parameters();
  for (size_t i = 0; i < values.size(); i++) parameters[i].copy_(values[i]);
}
at::Tensor wide_loss(ts::models::GPT2& model) {
  const auto text = (torch::arange(8 * 65).view({8, 65}) * 37).remainder(251);
  return ts::models::loss(model(text.narrow(1, 0, 64).contiguous()), text.narrow(1, 1, 64).contiguous());
}

// Over tp as Megatron: c_attn and c_fc by columns, c_proj by rows, the vocabulary; over fsdp the other dim, or dim 0.
ts::Placements gpt_placements(const std::string& name, const at::Tensor& p) {
  const auto ends = [&](const char* end) { return name.ends_with(end); };
  ts::Placement tp = ts::Replicate();
  if (ends("c_attn.weight") || ends("c_attn.bias")) tp = ts::StridedShard(0, 3);
  if (ends("c_fc.weight") || ends("c_fc.bias") || ends("wte.weight")) tp = ts::Shard(0);
  if (ends("c_proj.weight")) tp = ts::Shard(1);
  const bool tp_has_dim_0 = tp.is_sharded(0);
  const auto fsdp = !tp_has_dim_0 ? ts::Shard(0) : p.dim() == 2 ? ts::Shard(1) : ts::Replicate();
  return {ts::Replicate(), fsdp, tp};
}

// The model on one rank of a mesh, and its batches.
struct GPTRank {
  ts::DeviceMesh mesh;
  ts::models::GPT2 model{kSmallGPT};

  GPTRank(ts::testing::Rank& me, const GPTMesh& layout, const ts::models::GPT2& start) : mesh(me.mesh(layout.text())) {
    copy_weights(start, model);
    for (auto& item : model->named_parameters())
      ts::distribute_in_place(item.value(), mesh, gpt_placements(item.key(), item.value()),
                              {.src_data_rank = std::nullopt});
  }
  // Forward and backward on the batch of a step. Returns the loss.
  at::Tensor backward(int step, bool invariant) const {
    const auto text = (torch::arange(12 * 13).view({12, 13}) * (7 + 4 * step)).remainder(61);
    const ts::Placements rows = {ts::Shard(0), ts::Shard(0), ts::Replicate()};
    const ts::DistributeOptions own{.src_data_rank = std::nullopt};
    const auto tokens = ts::distribute_tensor(text.narrow(1, 0, 12).contiguous(), mesh, rows, own);
    const auto targets = ts::distribute_tensor(text.narrow(1, 1, 12).contiguous(), mesh, rows, own);
    std::optional<ts::NumericsScope> scope;
    if (invariant) scope.emplace(ts::Numerics::Invariant);
    auto handle = model;
    auto loss = ts::models::loss(handle(tokens), targets);
    loss.backward();
    return loss;
  }
};

// SHA-256 of the losses and the final weights, equal on all ranks.
std::string train_gpt(const GPTMesh& layout, const ts::models::GPT2& start) {
  std::string digest;
  std::mutex lock;
  ts::testing::run_ranks(layout.ranks(), [&](ts::testing::Rank& me) {
    const GPTRank rank(me, layout, start);
    ts::optim::AdamW optimizer(rank.model->parameters(), {.lr = 1e-2});
    ts::comm::store::Sha256 hash;
    const auto add = [&](const at::Tensor& t) {
      const auto plain = (ts::is_dtensor(t) ? ts::DTensor(t).full_tensor() : t).detach().contiguous();
      hash.update({static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()});
    };
    for (int step = 0; step < 3; step++) {
      optimizer.zero_grad();
      add(rank.backward(step, true));
      const ts::NumericsScope scope(ts::Numerics::Invariant);
      add(ts::optim::clip_grad_norm_(rank.model->parameters(), 0.5));
      optimizer.step();
    }
    for (const auto& p : rank.model->parameters()) add(p);
    std::string mine;
    for (const unsigned char byte : hash.finish()) mine += c10::str(byte / 16, ".", byte % 16, " ");
    const std::lock_guard guard(lock);
    if (digest.empty()) digest = mine;
    EXPECT_EQ(mine, digest) << "ranks of one mesh differ";
  });
  return digest;
}

// Gradients of the first step on a mesh, by name.
std::map<std::string, at::Tensor> gpt_gradients(const GPTMesh& layout, const ts::models::GPT2& start, bool invariant) {
  std::map<std::string, at::Tensor> gradients;
  ts::testing::run_ranks(layout.ranks(), [&](ts::testing::Rank& me) {
    const GPTRank rank(me, layout, start);
    rank.backward(0, invariant);
    for (const auto& item : rank.model->named_parameters()) {
      const auto gradient = ts::DTensor(item.value().grad()).full_tensor().clone();
      if (me.rank == 0) gradients[item.key()] = gradient;
    }
  });
  return gradients;
}

TEST(InvariantGPT, GradientsAreThoseOfTheDefault) {
  torch::manual_seed(3);
  const ts::models::GPT2 start(kSmallGPT);
  const auto expected = gpt_gradients({}, start, false);
  for (const auto& layout : {GPTMesh{1, 1, 1}, GPTMesh{2, 1, 1}, GPTMesh{1, 1, 2}})
    for (const auto& [name, gradient] : gpt_gradients(layout, start, true))
      EXPECT_LT((gradient - expected.at(name)).abs().max().item<double>(), 1e-6) << layout.text() << " " << name;
}

// Root mean square error of all gradients against float64, relative to their root mean square.
double gradient_error(const ts::models::GPT2& start, ts::Numerics numerics, const std::vector<at::Tensor>& exact) {
  ts::models::GPT2 model(kWideGPT);
  copy_weights(start, model);
  const ts::NumericsScope scope(numerics);
  wide_loss(model).backward();
  double error = 0, size = 0;
  for (size_t i = 0; i < exact.size(); i++) {
    const ts::OpModesOff plain;
    const auto gradient = model->parameters()[i].grad().to(torch::kDouble);
    error += (gradient - exact[i]).square().sum().item<double>();
    size += exact[i].square().sum().item<double>();
  }
  return std::sqrt(error / size);
}

TEST(InvariantGPT, GradientsAreAsAccurateAsThoseOfTheDefault) {
  torch::manual_seed(3);
  const ts::models::GPT2 start(kWideGPT);
  ts::models::GPT2 precise(kWideGPT);
  precise->to(torch::kDouble);
  copy_weights(start, precise);
  wide_loss(precise).backward();
  std::vector<at::Tensor> exact;
  for (const auto& p : precise->parameters()) exact.push_back(p.grad());
  const double by_default = gradient_error(start, ts::Numerics::Strict, exact);
  const double invariant = gradient_error(start, ts::Numerics::Invariant, exact);
  std::cout << "relative error of the gradients: default " << by_default << ", invariant " << invariant << "\n";
  EXPECT_LT(invariant, 1.05 * by_default);
  EXPECT_GT(invariant, 1e-9);  // the comparison is not of float64 with itself
}

TEST(InvariantGPT, GivesTheSameBitsOnEveryMesh) {
  torch::manual_seed(3);
  const ts::models::GPT2 start(kSmallGPT);
  const auto one_rank = train_gpt({}, start);
  const std::vector<GPTMesh> meshes = {{2, 1, 1}, {3, 1, 1}, {6, 1, 1}, {1, 2, 1}, {1, 3, 1},
                                       {1, 1, 2}, {1, 1, 3}, {2, 1, 2}, {1, 2, 2}};
  for (const auto& mesh : meshes) EXPECT_EQ(train_gpt(mesh, start), one_rank) << mesh.text();
}

}  // namespace
