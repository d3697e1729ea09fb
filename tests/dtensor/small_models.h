#pragma once
#include "tessera/dtensor/dtensor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

// Small models as functions of named parameters, so that the same code runs on plain tensors and on DTensors.
namespace tessera::test {

using Parameters = std::map<std::string, at::Tensor>;

struct Model {
  Parameters parameters;  // plain, float
  std::function<at::Tensor(Model&, const at::Tensor& x, const at::Tensor& y)> loss;
  // Called where a tensor-parallel part begins and ends. by_hand() sets them to explicit collectives.
  std::function<at::Tensor(const at::Tensor&)> enter = [](const at::Tensor&t) { return t; }, leave = enter;
  at::Tensor x, y;  // the global batch
  std::map<std::string, at::Tensor> constants = {};
  std::map<std::string, Placement> tensor_parallel;  // parameters that are not replicated over "tp"
};

inline at::Tensor weight(int64_t out, int64_t in) { return at::randn({out, in}) / std::sqrt(static_cast<double>(in)); }

inline Model mlp() {
  at::manual_seed(7);
  Model m;
  m.parameters = {
      {"w1", weight(16, 10)}, {"b1", at::randn({16}) * 0.1}, {"w2", weight(10, 16)}, {"b2", at::randn({10}) * 0.1}};
  m.x = at::randn({6, 10});
  m.y = at::randn({6, 10});
  m.tensor_parallel = {{"w1", Shard(0)}, {"b1", Shard(0)}, {"w2", Shard(1)}};
  m.loss = [](Model& m, const at::Tensor& x, const at::Tensor& y) {
    auto& p = m.parameters;
    auto h = at::relu(at::linear(m.enter(x), p["w1"], p["b1"]));
    return at::mse_loss(m.leave(at::linear(h, p["w2"], p["b2"])), y);
  };
  return m;
}

inline constexpr int64_t kVocab = 19, kWidth = 24, kHeads = 6, kContext = 5;

// One block of a GPT: embeddings, causal attention, MLP, both behind a layer norm, and a cross entropy.
inline Model transformer() {
  at::manual_seed(11);
  Model m;
  auto& p = m.parameters;
  p["tokens"] = at::randn({kVocab, kWidth}) * 0.3;
  p["positions"] = at::randn({kContext, kWidth}) * 0.3;
  for (const char* name : {"q", "k", "v", "o"}) p[name] = weight(kWidth, kWidth);
  p["up"] = weight(4 * kWidth, kWidth);
  p["up_bias"] = at::zeros({4 * kWidth});
  p["down"] = weight(kWidth, 4 * kWidth);
  p["down_bias"] = at::zeros({kWidth});
  for (const char* name : {"norm1", "norm2", "norm3"}) {
    p[name] = at::ones({kWidth});
    p[std::string(name) + "_bias"] = at::zeros({kWidth});
  }
  p["head"] = weight(kVocab, kWidth);
  m.x = at::randint(kVocab, {4, kContext}, at::kLong);
  m.y = at::randint(kVocab, {4, kContext}, at::kLong);
  const auto heads = Shard(0, kWidth / kHeads);
  m.tensor_parallel = {{"q", heads},     {"k", heads},          {"v", heads},      {"o", Shard(1, kWidth / kHeads)},
                       {"up", Shard(0)}, {"up_bias", Shard(0)}, {"down", Shard(1)}};
  m.loss = [](Model& m, const at::Tensor& x, const at::Tensor& y) {
    auto& p = m.parameters;
    const int64_t batch = x.size(0);
    auto norm = [&](const at::Tensor& h, const std::string& name) {
      return at::layer_norm(h, {kWidth}, p[name], p[name + "_bias"]);
    };
    auto by_head = [&](const at::Tensor& h, const char* name) {
      return at::linear(h, p[name]).view({batch, kContext, kHeads, kWidth / kHeads}).transpose(1, 2);
    };
    auto h = at::embedding(p["tokens"], x) + p["positions"];
    auto a = m.enter(norm(h, "norm1"));
    auto attended = at::scaled_dot_product_attention(by_head(a, "q"), by_head(a, "k"), by_head(a, "v"), {}, 0.0, true);
    h = h + m.leave(at::linear(attended.transpose(1, 2).contiguous().view({batch, kContext, kWidth}), p["o"]));
    auto f = at::gelu(at::linear(m.enter(norm(h, "norm2")), p["up"], p["up_bias"]));
    h = h + m.leave(at::linear(f, p["down"], p["down_bias"]));
    auto logits = at::linear(norm(h, "norm3"), p["head"]);
    return at::cross_entropy_loss(logits.view({batch * kContext, kVocab}), y.view({batch * kContext}));
  };
  return m;
}

// One block of a Llama: RMS norms, rotary positions, grouped-query attention, SwiGLU, no biases.
inline Model llama() {
  constexpr int64_t kGroups = 3, kHead = kWidth / kHeads;  // two query heads share a key and a value
  at::manual_seed(13);
  Model m;
  auto& p = m.parameters;
  p["tokens"] = at::randn({kVocab, kWidth}) * 0.3;
  p["q"] = weight(kWidth, kWidth);
  p["k"] = weight(kGroups * kHead, kWidth);
  p["v"] = weight(kGroups * kHead, kWidth);
  p["o"] = weight(kWidth, kWidth);
  p["gate"] = weight(3 * kWidth, kWidth);
  p["up"] = weight(3 * kWidth, kWidth);
  p["down"] = weight(kWidth, 3 * kWidth);
  for (const char* name : {"norm1", "norm2", "norm3"}) p[name] = at::ones({kWidth});
  p["head"] = weight(kVocab, kWidth);
  const auto angle = at::arange(kContext).view({kContext, 1, 1}) / at::pow(100., at::arange(kHead / 2) / (kHead / 2.));
  m.constants["cos"] = at::cat({angle.cos(), angle.cos()}, -1);  // (T, 1, D)
  m.constants["sin"] = at::cat({angle.sin(), angle.sin()}, -1);
  m.x = at::randint(kVocab, {4, kContext}, at::kLong);
  m.y = at::randint(kVocab, {4, kContext}, at::kLong);
  m.tensor_parallel = {{"q", Shard(0, 2 * kHead)}, {"k", Shard(0, kHead)}, {"v", Shard(0, kHead)},
                       {"o", Shard(1, 2 * kHead)}, {"gate", Shard(0)},     {"up", Shard(0)},
                       {"down", Shard(1)}};
  m.loss = [](Model& m, const at::Tensor& x, const at::Tensor& y) {
    auto& p = m.parameters;
    const int64_t batch = x.size(0);
    auto norm = [&](const at::Tensor& h, const char* name) {
      return h * at::rsqrt(h.pow(2).mean({-1}, true) + 1e-6) * p[name];
    };
    auto heads = [&](const at::Tensor& h, const char* name, int64_t n) {
      return at::linear(h, p[name]).view({batch, kContext, n, kHead});
    };
    auto rotate = [&](const at::Tensor& h) {
      auto half = at::cat({-h.slice(-1, kHead / 2), h.slice(-1, 0, kHead / 2)}, -1);
      return h * m.constants["cos"] + half * m.constants["sin"];
    };
    auto repeat = [&](const at::Tensor& h) {  // (B, T, G, D) -> (B, T, H, D)
      return h.unsqueeze(3)
          .expand({batch, kContext, kGroups, kHeads / kGroups, kHead})
          .reshape({batch, kContext, kHeads, kHead});
    };
    auto h = at::embedding(p["tokens"], x);
    auto a = norm(h, "norm1");
    auto q = rotate(heads(a, "q", kHeads)), k = repeat(rotate(heads(a, "k", kGroups))),
         v = repeat(heads(a, "v", kGroups));
    auto attended =
        at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), {}, 0.0, true);
    h = h + at::linear(attended.transpose(1, 2).reshape({batch, kContext, kWidth}), p["o"]);
    auto b = norm(h, "norm2");
    h = h + at::linear(at::silu(at::linear(b, p["gate"])) * at::linear(b, p["up"]), p["down"]);
    auto logits = at::linear(norm(h, "norm3"), p["head"]);
    return at::cross_entropy_loss(logits.view({batch * kContext, kVocab}), y.view({batch * kContext}));
  };
  return m;
}

// Two convolutions, a group norm, a pooling of each kind, a linear layer.
inline Model conv_net() {
  at::manual_seed(17);
  Model m;
  auto& p = m.parameters;
  p["conv1"] = at::randn({6, 3, 3, 3}) * 0.3;
  p["conv1_bias"] = at::zeros({6});
  p["norm"] = at::ones({6});
  p["norm_bias"] = at::zeros({6});
  p["conv2"] = at::randn({8, 6, 3, 3}) * 0.2;
  p["conv2_bias"] = at::zeros({8});
  p["head"] = weight(5, 8 * 4);
  p["head_bias"] = at::zeros({5});
  m.x = at::randn({6, 3, 8, 8});
  m.y = at::randint(5, {6}, at::kLong);
  m.tensor_parallel = {{"head", Shard(0)}, {"head_bias", Shard(0)}};
  m.loss = [](Model& m, const at::Tensor& x, const at::Tensor& y) {
    auto& p = m.parameters;
    auto h = at::conv2d(x, p["conv1"], p["conv1_bias"], 1, 1);
    h = at::max_pool2d(at::relu(at::group_norm(h, 2, p["norm"], p["norm_bias"])), 2);
    h = at::adaptive_avg_pool2d(at::relu(at::conv2d(h, p["conv2"], p["conv2_bias"])), {2, 2});
    return at::cross_entropy_loss(at::linear(h.flatten(1), p["head"], p["head_bias"]), y);
  };
  return m;
}

inline Model copy(const Model& model) {
  Model m = model;
  for (auto& [name, t] : m.parameters) t = t.clone();
  return m;
}

// The same model over a mesh that may have the axes "dp" and "tp".
inline Model distribute(const Model& model, const DeviceMesh& mesh) {
  Model m = model;
  auto place = [&](const Placement& on_dp, const Placement& on_tp) {
    Placements p;
    for (const auto& name : mesh.names()) p.push_back(name == "dp" ? on_dp : on_tp);
    return p;
  };
  for (auto& [name, t] : m.parameters) {
    const auto found = model.tensor_parallel.find(name);
    t = distribute_tensor(t, mesh,
                          place(Replicate(), found == model.tensor_parallel.end() ? Replicate() : found->second));
  }
  for (auto& [name, t] : m.constants) t = distribute_tensor(t, mesh);
  m.x = distribute_tensor(m.x, mesh, place(Shard(0), Replicate()));
  m.y = distribute_tensor(m.y, mesh, place(Shard(0), Replicate()));
  return m;
}

// The same model with explicit tensor-parallel collectives, as in the parallel styles: replicated inputs and outputs.
inline Model by_hand(Model m) {
  m.enter = [](const at::Tensor& t) -> at::Tensor {  // all-reduces the gradient
    const DTensor d(t);
    return DTensor::from_local(d.to_local(), d.device_mesh(), d.placements(),
                               {.shape = t.sizes().vec(), .stride = t.strides().vec()});
  };
  m.leave = [](const at::Tensor& t) -> at::Tensor {  // all-reduces the partial output
    const DTensor d(t);
    Placements to(d.placements().begin(), d.placements().end());
    for (auto& p : to)
      if (p.is_partial()) p = Replicate();
    return d.redistribute(to);
  };
  return m;
}

enum class Optimizer { Sgd, FusedAdamW };

// Trains in place; returns the loss of each step.
inline std::vector<double> train(Model& m, Optimizer optimizer, int steps) {
  std::vector<at::Tensor> parameters, m1, m2, step_counts;
  for (auto& [name, t] : m.parameters) {
    t.set_requires_grad(true);
    parameters.push_back(t);
    m1.push_back(at::zeros_like(t.detach()));
    m2.push_back(at::zeros_like(t.detach()));
    step_counts.push_back(at::zeros({}));
  }
  std::vector<double> losses;
  for (int step = 0; step < steps; step++) {
    for (auto& t : parameters) t.mutable_grad().reset();
    auto loss = m.loss(m, m.x, m.y);
    loss.backward();
    losses.push_back(loss.item<double>());
    at::NoGradGuard no_grad;
    if (optimizer == Optimizer::Sgd) {
      for (auto& t : parameters) t.add_(t.grad(), -0.03);
    } else {
      std::vector<at::Tensor> gradients;
      for (auto& t : parameters) gradients.push_back(t.grad());
      for (auto& t : step_counts) t.add_(1);
      const double lr = 1e-3 * (step + 1);  // a changing learning rate must not cause cache misses
      at::_fused_adamw_(parameters, gradients, m1, m2, {}, step_counts, lr, 0.9, 0.999, 0.01, 1e-8, false, false);
    }
  }
  return losses;
}

// Trains `start` on the mesh and expects the losses and parameters of `plain`, which is trained already.
inline void expect_trains_like(const Model& plain, const std::vector<double>& losses, const Model& start,
                               const DeviceMesh& mesh, Optimizer optimizer) {
  auto model = distribute(start, mesh);
  const auto found = train(model, optimizer, static_cast<int>(losses.size()));
  for (size_t i = 0; i < losses.size(); i++)
    ASSERT_NEAR(found[i], losses[i], 1e-6 * std::max(1.0, losses[i])) << "loss of step " << i;
  for (auto& [name, t] : model.parameters) {
    const auto difference = DTensor(t.detach()).full_tensor() - plain.parameters.at(name).detach();
    EXPECT_LE(difference.abs().max().item<double>(), 1e-6) << name;
  }
}

}  // namespace tessera::test
