#include "tessera/models/detail/moe.h"

#include "tessera/base/detail/libtorch_autograd_compat.h"
#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/detail/layers.h"
#include "tessera/nn/checkpoint.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/nn/init.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tessera::models {
namespace {

using torch::autograd::variable_list;

std::vector<int64_t> to_vector(const at::Tensor& counts) {
  const at::Tensor host = counts.to(at::kCPU, at::kLong).contiguous();
  return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
}

// exchange_rows in the other direction.
struct ExchangeRowsBackward final : torch::autograd::Node {
  comm::Group group;
  std::vector<int64_t> send, recv;
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) return variable_list(1);
    return {exchange_rows(gradients[0], send, recv, group)};
  }
};

// Passes the gradient of the first input on, and gives the second one, a scalar, a constant gradient.
struct AttachLossBackward final : torch::autograd::Node {
  double gradient = 0;
  at::TensorOptions options;
  variable_list apply(variable_list&& gradients) override { return {gradients[0], at::full({}, gradient, options)}; }
};

// Returns x. Backward adds the gradient of scale * loss.
at::Tensor attach_loss(const at::Tensor& x, const at::Tensor& loss, double scale) {
  if (!at::GradMode::is_enabled() || !loss.requires_grad() || scale == 0) return x;
  at::Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = x.detach();
  }
  auto node = libtorch::make_node<AttachLossBackward>();
  node->gradient = scale;
  node->options = loss.options();
  node->set_next_edges(torch::autograd::collect_next_edges(x, loss));
  torch::autograd::set_history(result, node);
  return result;
}

at::Tensor local_of(const at::Tensor& parameter) {
  return is_dtensor(parameter) ? DTensor(parameter).to_local() : parameter;
}

}  // namespace

Routing route_tokens(const at::Tensor& logits, const at::Tensor& bias, const MoEConfig& config) {
  const int64_t tokens = logits.size(0), experts = config.n_experts, k = config.top_k;
  const bool low_precision = logits.scalar_type() == at::kHalf || logits.scalar_type() == at::kBFloat16;
  const at::Tensor probabilities = (low_precision ? logits.to(at::kFloat) : logits).softmax(-1);  // (N, E)
  const at::Tensor for_choice = bias.defined() ? probabilities.detach() + bias : probabilities.detach();
  const at::Tensor chosen = std::get<1>(for_choice.topk(k, -1));  // (N, k)
  at::Tensor weights = probabilities.gather(-1, chosen);          // (N, k)
  weights = weights / weights.sum(-1, /*keepdim=*/true);

  Routing routing;
  const at::Tensor flat = chosen.flatten();  // row r is choice r % k of token r / k
  const at::Tensor order = std::get<1>(flat.sort(/*stable=*/true, -1, false));
  const at::Tensor counts = flat.bincount({}, experts);
  routing.rows = routing.chosen = to_vector(counts);
  const at::Tensor share =
      counts.to(probabilities.scalar_type()) / static_cast<double>(std::max<int64_t>(tokens * k, 1));
  routing.aux_loss = (share * probabilities.mean(0)).sum() * static_cast<double>(experts);

  at::Tensor kept = order;
  if (config.capacity_factor > 0) {
    const auto capacity = static_cast<int64_t>(
        std::ceil(config.capacity_factor * static_cast<double>(tokens * k) / static_cast<double>(experts)));
    std::vector<at::Tensor> parts;
    int64_t begin = 0;
    for (int64_t& rows : routing.rows) {
      const int64_t within = std::min(rows, capacity);
      parts.push_back(order.narrow(0, begin, within));
      begin += rows;
      rows = within;
    }
    kept = at::cat(parts);
  }
  routing.token = kept.div(k, "floor");
  routing.weight = weights.flatten().index_select(0, kept);
  return routing;
}

int64_t Routing::dropped() const {
  return std::reduce(chosen.begin(), chosen.end()) - std::reduce(rows.begin(), rows.end());
}

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& w, const std::vector<int64_t>& rows) {
  if (x.is_cuda() && x.scalar_type() == at::kBFloat16) {
    std::vector<int32_t> ends(rows.size());
    std::partial_sum(rows.begin(), rows.end(), ends.begin());
    return at::_grouped_mm(x, w.transpose(-2, -1), at::tensor(ends, at::kInt).to(x.device()));
  }
  std::vector<at::Tensor> results;
  const std::vector<at::Tensor> parts = x.split_with_sizes(rows);
  for (size_t i = 0; i < rows.size(); ++i) results.push_back(at::linear(parts[i], w[static_cast<int64_t>(i)]));
  return at::cat(results);
}

at::Tensor exchange_rows(const at::Tensor& x, const std::vector<int64_t>& send, const std::vector<int64_t>& recv,
                         const comm::Group& group) {
  at::Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = funcol::all_to_all(x.contiguous(), 0, send, 0, recv, group);
    funcol::wait(result, group);
  }
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return result;
  auto node = libtorch::make_node<ExchangeRowsBackward>();
  node->group = group;
  node->send = recv;
  node->recv = send;
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  torch::autograd::set_history(result, node);
  return result;
}

MoEImpl::MoEImpl(int64_t dim, int64_t ffn_dim, const MoEConfig& config) : dim(dim), ffn_dim(ffn_dim), config(config) {
  MoEImpl::reset();
}

void MoEImpl::reset() {
  const int64_t n = config.n_experts;
  gate = register_module("gate", linear(dim, n, /*bias=*/false));
  w1 = register_parameter("w1", at::empty({n, ffn_dim, dim}));
  w2 = register_parameter("w2", at::empty({n, dim, ffn_dim}));
  w3 = register_parameter("w3", at::empty({n, ffn_dim, dim}));
  if (config.n_shared_experts > 0) {
    const int64_t shared = config.n_shared_experts * ffn_dim;
    shared_w1 = register_module("shared_w1", linear(dim, shared, /*bias=*/false));
    shared_w2 = register_module("shared_w2", linear(shared, dim, /*bias=*/false));
    shared_w3 = register_module("shared_w3", linear(dim, shared, /*bias=*/false));
  }
  if (config.bias_update_rate > 0) expert_bias = register_buffer("expert_bias", at::zeros({n}));
  statistics_.tokens_per_expert.assign(n, 0);
  init_weights(kInitStd, kInitStd);
}

void MoEImpl::init_weights(double std, double residual_std) {
  init_linear(gate, std);
  torch::nn::init::normal_(w1, 0, std);
  torch::nn::init::normal_(w2, 0, residual_std);
  torch::nn::init::normal_(w3, 0, std);
  if (shared_w1.is_empty()) return;
  init_linear(shared_w1, std);
  init_linear(shared_w2, residual_std);
  init_linear(shared_w3, std);
}

void MoEImpl::expert_parallel(const DeviceMesh& mesh) {
  TESSERA_CHECK(mesh.ndim() == 1, UsageError, "expert_parallel takes a 1-D mesh, such as mesh[\"ep\"]; found ", mesh);
  TESSERA_CHECK(config.n_experts % mesh.size() == 0, UsageError, "expert_parallel: ", config.n_experts,
                " experts cannot be divided among ", mesh.size(), " ranks of mesh ", mesh,
                ". The number of experts must be a multiple of it");
  for (at::Tensor* w : {&w1, &w2, &w3}) distribute_in_place(*w, mesh, {Shard(0)}, {.src_data_rank = std::nullopt});
  expert_mesh_ = mesh;
}

at::Tensor MoEImpl::experts(const at::Tensor& x, const std::vector<int64_t>& rows) const {
  // Under mixed precision, FSDP casts all parameters but those that are sharded over ep.
  const auto weight = [&](const at::Tensor& w) { return local_of(w).to(x.scalar_type()); };
  const at::Tensor gated = at::silu(grouped_linear(x, weight(w1), rows));
  return grouped_linear(gated * grouped_linear(x, weight(w3), rows), weight(w2), rows);
}

// Rows for each expert travel to the rank of the expert, and the results travel back.
at::Tensor MoEImpl::experts_on_ranks(const at::Tensor& x, const std::vector<int64_t>& rows) const {
  const comm::Group group = expert_mesh_.get_group();
  const int64_t ranks = group->size(), local = config.n_experts / ranks;
  // counts[r * local + e]: rows that rank r sends to local expert e
  const at::Tensor mine = at::tensor(rows).to(x.device());
  const std::vector<int64_t> equal(ranks, local);
  const at::Tensor exchanged = funcol::all_to_all(mine, 0, equal, 0, equal, group);
  funcol::wait(exchanged, group);
  const std::vector<int64_t> counts = to_vector(exchanged);
  std::vector<int64_t> send(ranks, 0), recv(ranks, 0), rows_here(local, 0);
  for (int64_t rank = 0; rank < ranks; ++rank)
    for (int64_t e = 0; e < local; ++e) {
      send[rank] += rows[rank * local + e];
      recv[rank] += counts[rank * local + e];
      rows_here[e] += counts[rank * local + e];
    }
  const at::Tensor arrived = exchange_rows(x, send, recv, group);  // by rank, then by expert

  std::vector<int64_t> begin(counts.size(), 0);
  std::partial_sum(counts.begin(), counts.end() - 1, begin.begin() + 1);
  std::vector<int64_t> by_expert;  // the rows of `arrived`, by expert, then by rank
  for (int64_t e = 0; e < local; ++e)
    for (int64_t rank = 0; rank < ranks; ++rank)
      for (int64_t i = 0; i < counts[rank * local + e]; ++i) by_expert.push_back(begin[rank * local + e] + i);
  std::vector<int64_t> by_rank(by_expert.size());
  for (size_t i = 0; i < by_expert.size(); ++i) by_rank[by_expert[i]] = static_cast<int64_t>(i);
  const auto index = [&](const std::vector<int64_t>& rows) { return at::tensor(rows, at::kLong).to(x.device()); };
  const at::Tensor results = experts(arrived.index_select(0, index(by_expert)), rows_here);
  return exchange_rows(results.index_select(0, index(by_rank)), recv, send, group);
}

at::Tensor MoEImpl::forward(const at::Tensor& x) {
  const at::Tensor tokens = x.flatten(0, -2);  // (N, C)
  const Routing routing = route_tokens(gate(tokens), expert_bias, config);
  const at::Tensor rows = tokens.index_select(0, routing.token);
  const at::Tensor results = expert_mesh_ ? experts_on_ranks(rows, routing.rows) : experts(rows, routing.rows);
  const at::Tensor weighted = results * routing.weight.unsqueeze(-1).to(results.scalar_type());
  at::Tensor y = at::zeros_like(tokens).index_add(0, routing.token, weighted);
  if (!shared_w1.is_empty()) y = y + shared_w2(at::silu(shared_w1(tokens)) * shared_w3(tokens));

  if (is_training() && !recomputing()) {
    statistics_.dropped += routing.dropped();
    for (size_t e = 0; e < routing.chosen.size(); ++e) statistics_.tokens_per_expert[e] += routing.chosen[e];
    statistics_.aux_loss = (statistics_.aux_loss * static_cast<double>(forwards_) + routing.aux_loss.item<double>()) /
                           static_cast<double>(forwards_ + 1);
    ++forwards_;
  }
  return attach_loss(y.view(x.sizes()), routing.aux_loss, config.aux_loss_weight * aux_loss_scale);
}

void MoEImpl::update_bias(const comm::Group& group) {
  at::Tensor counts = at::tensor(statistics_.tokens_per_expert);
  if (group && expert_bias.defined()) {
    counts = counts.to(expert_bias.device());
    group->all_reduce(counts, ReduceOp::Sum).wait();
  }
  update_bias(counts);
}

void MoEImpl::update_bias(const at::Tensor& tokens_per_expert) {
  const at::NoGradGuard no_grad;
  if (expert_bias.defined()) {
    const at::Tensor counts = tokens_per_expert.to(expert_bias.options());
    expert_bias.add_((counts.mean() - counts).sign(), config.bias_update_rate);
  }
  statistics_ = {};
  statistics_.tokens_per_expert.assign(config.n_experts, 0);
  forwards_ = 0;
}

}  // namespace tessera::models
