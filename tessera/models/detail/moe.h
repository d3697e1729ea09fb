#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/detail/model_config.h"
#include "tessera/nn/holder.h"
#include "tessera/nn/modules.h"

// A mixture of experts: a router sends each token to its top-k experts, and the results are added with the router's
// weights. With expert parallelism, each rank of an axis has a part of the experts, and tokens travel to them.
namespace tessera::models {

// What the router decides for N tokens. Rows of `token` and `weight` belong together: one row per token and expert, in
// the order of the experts, and within an expert in the order of the tokens.
struct Routing {
  at::Tensor token;             // (rows) indices of tokens
  at::Tensor weight;            // (rows), differentiable
  std::vector<int64_t> rows;    // per expert
  std::vector<int64_t> chosen;  // per expert: rows, and the dropped ones
  at::Tensor aux_loss;          // E * sum_e (share of the choices of e) * (mean probability of e); 1 if balanced
  int64_t dropped() const;      // choices above the capacity of an expert
};

// `logits`: (N, E). `bias`: (E), added for the choice only, or undefined.
Routing route_tokens(const at::Tensor& logits, const at::Tensor& bias, const MoEConfig& config);

// The linear layers of all experts on rows that are sorted by expert: row r of expert e gives x[r] @ w[e]^T. On CUDA
// one grouped product, otherwise one product per expert. `rows`: per expert. `w`: (E, out, in).
at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& w, const std::vector<int64_t>& rows);

// Exchanges rows (dim 0): sends the next send[r] rows to rank r, and returns the recv[r] rows of each rank r, in the
// order of the ranks. Differentiable.
at::Tensor exchange_rows(const at::Tensor& x, const std::vector<int64_t>& send, const std::vector<int64_t>& recv,
                         const comm::Group& group);

// The sums since the last reset, over the tokens of this rank in training mode.
struct RouterStatistics {
  std::vector<int64_t> tokens_per_expert;  // choices, dropped ones included
  int64_t dropped = 0;
  double aux_loss = 0;  // mean over forwards

  bool operator==(const RouterStatistics&) const = default;
};

// The feed-forward network of a transformer block with experts. Parameters:
// gate.weight  w1  w2  w3  and with shared experts  shared_w1.weight  shared_w2.weight  shared_w3.weight
struct MoEImpl : torch::nn::Cloneable<MoEImpl> {
  MoEImpl(int64_t dim, int64_t ffn_dim, const MoEConfig& config);
  void reset() override;
  void init_weights(double std, double residual_std);
  at::Tensor forward(const at::Tensor& x);  // (B, T, C) -> (B, T, C)

  // Gives each rank of the 1-D mesh a part of the experts, in order: their weights become DTensors with placement S(0).
  // Throws UsageError if the number of experts is not divisible. Call it before the first forward.
  void expert_parallel(const DeviceMesh& mesh);

  RouterStatistics statistics() const { return statistics_; }
  // Moves the bias of each expert by bias_update_rate towards balance, and resets the statistics. With `group`, the
  // choices of all its ranks count.
  void update_bias(const comm::Group& group = {});
  // The same for these choices per expert, (E).
  void update_bias(const at::Tensor& tokens_per_expert);
  // The gradient of the auxiliary loss is added in backward, times this: 1 / number of microbatches or data ranks, if
  // the loss is divided by it.
  double aux_loss_scale = 1;

  int64_t dim, ffn_dim;
  MoEConfig config;
  nn::Linear gate{nullptr};
  at::Tensor w1, w2, w3;                                                  // (E, F, C), (E, C, F), (E, F, C)
  nn::Linear shared_w1{nullptr}, shared_w2{nullptr}, shared_w3{nullptr};  // null without shared experts
  at::Tensor expert_bias;                                                 // (E), a buffer; undefined without balancing

 private:
  at::Tensor experts(const at::Tensor& x, const std::vector<int64_t>& rows) const;
  at::Tensor experts_on_ranks(const at::Tensor& x, const std::vector<int64_t>& rows) const;

  DeviceMesh expert_mesh_;
  RouterStatistics statistics_;
  int64_t forwards_ = 0;
};
TESSERA_MODULE(MoE);

}  // namespace tessera::models
