#pragma once
#include "tessera/dtensor/dtensor.h"
#include "tessera/rules/detail/meta_call.h"
#include "tessera/testing/detail/op_call.h"
#include "tessera/testing/detail/simulated_mesh.h"
#include "tessera/testing/ranks.h"
#include "tessera/testing/rule_oracle.h"

#include <ATen/ops/linspace.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <iostream>
#include <set>
#include <string>
#include <vector>

// Gradients of every strategy. The inputs of an op get the placements of a strategy, autograd runs above the op, and
// the gradients are compared with those of plain tensors.
namespace tessera::testing {

// The placements of all tensors of a call on one mesh axis, one list per strategy. A view gets every placement.
inline std::vector<Placements> strategy_placements(const OpCall& call, const Sample& sample) {
  const auto& rule = *rules::registry().find(sample.op);
  const auto query = call.query(sample.plain_args);
  int elements = 1;
  if (rule.lists == rules::ListMode::Elementwise)
    for (const auto& t : query.tensors) elements = std::max(elements, t.element + 1);
  std::vector<Placements> all;
  for (int e = 0; e < elements; e++) {
    auto sub = query;
    std::vector<size_t> index;
    sub.tensors.clear();
    for (size_t i = 0; i < query.tensors.size(); i++) {
      const bool other = rule.lists == rules::ListMode::Elementwise && query.tensors[i].element >= 0;
      if (other && query.tensors[i].element != e) continue;
      sub.tensors.push_back(query.tensors[i]);
      index.push_back(i);
    }
    const auto found = rules::evaluate(rule, find_op(sample.op), sub);
    std::vector<Placements> rows;
    for (const auto& strategy : found.strategies) rows.push_back(strategy.in);
    if (found.follow) {
      rows = {{Replicate()}, {Partial()}};
      const bool in_place = call.slots()[0].written;  // such a view raises where it cannot keep a sharding
      for (int64_t d = 0; d < call.tensors()[0].dim(); d++)
        if (!in_place || found.follow({Shard(d)}, {2})[0]) rows.push_back({Shard(d)});
    }
    for (size_t row = 0; row < rows.size(); row++) {
      if (row == all.size()) all.emplace_back(query.tensors.size(), Replicate());
      for (size_t i = 0; i < rows[row].size(); i++) all[row][index[i]] = rows[row][i];
    }
  }
  return all;
}

// Runs the call on `leaves`, and its backward. Returns one gradient per leaf; undefined: the leaf has none. An empty
// list: no result has a gradient.
inline std::vector<at::Tensor> gradients_of(const OpCall& call, const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> inputs, asked;
  for (size_t i = 0; i < leaves.size(); i++) {
    inputs.push_back(call.slots()[i].written ? leaves[i].clone() : leaves[i]);
    if (leaves[i].requires_grad()) asked.push_back(leaves[i]);
  }
  auto results = call.run(inputs);
  for (size_t i = 0; i < inputs.size(); i++)
    if (call.slots()[i].written) results.push_back(inputs[i]);
  std::vector<at::Tensor> through, seeds;
  for (const auto& result : results) {
    if (!result.defined() || !result.requires_grad()) continue;
    through.push_back(result);
    const auto seed = at::linspace(0.5, 1.5, result.numel(), at::kDouble).to(result.scalar_type());
    seeds.push_back(seed.reshape(result.sizes()));
    if (is_dtensor(result))
      seeds.back() = distribute_tensor(seeds.back(), DTensor(result).device_mesh(), {Replicate()});
  }
  if (through.empty() || asked.empty()) return {};
  auto found =
      torch::autograd::grad(through, asked, seeds, std::nullopt, /*create_graph=*/false, /*allow_unused=*/true);
  std::vector<at::Tensor> gradients(leaves.size());
  for (size_t i = 0, next = 0; i < leaves.size(); i++)
    if (leaves[i].requires_grad()) gradients[i] = found[next++];
  return gradients;
}

inline bool takes_gradient(const OpCall& call, const Sample& sample, size_t i) {
  const auto& t = call.tensors()[i];
  const bool plain = std::count(sample.plain_args.begin(), sample.plain_args.end(), call.slots()[i].arg) > 0;
  return !plain && (t.is_floating_point() || t.is_complex());
}

struct StrategyGradients {
  int64_t ops = 0, cases = 0;
  std::vector<std::string> wrong;
};

// Tests all samples on `ranks` thread ranks.
inline StrategyGradients verify_gradients(const std::vector<Sample>& samples, int64_t ranks) {
  // What a sample needs on each rank, and its gradients on plain tensors.
  struct Expected {
    const Sample& sample;
    OpCall call;
    std::vector<Placements> rows;
    std::vector<at::Tensor> gradients;
    std::vector<std::vector<std::vector<at::Tensor>>> locals;  // by row, tensor and rank
  };
  std::vector<Expected> all;
  std::set<std::string> ops;
  StrategyGradients report;
  for (const auto& sample : samples) {
    Expected one{sample, OpCall(sample), {}, {}, {}};
    // Samples of attention have no dropout.
    const bool is_random =
        find_op(sample.op).hasTag(at::Tag::nondeterministic_seeded) && sample.op.find("attention") == std::string::npos;
    if (!one.call.has_kernel() || is_random) continue;
    std::vector<at::Tensor> leaves;
    for (size_t i = 0; i < one.call.tensors().size(); i++)
      leaves.push_back(one.call.tensors()[i].detach().clone().set_requires_grad(takes_gradient(one.call, sample, i)));
    try {
      one.gradients = gradients_of(one.call, leaves);
    } catch (const std::exception&) {
      continue;  // the op has no gradient for plain tensors
    }
    if (one.gradients.empty()) continue;
    one.rows = strategy_placements(one.call, sample);
    for (const auto& row : one.rows) {
      one.locals.emplace_back();
      for (size_t i = 0; i < row.size(); i++)
        one.locals.back().push_back(scatter(one.call.tensors()[i], {row[i]}, {ranks}));
    }
    ops.insert(sample.op);
    report.cases += static_cast<int64_t>(one.rows.size());
    all.push_back(std::move(one));
  }
  report.ops = static_cast<int64_t>(ops.size());
  run_ranks(ranks, [&](Rank& me) {
    const auto mesh = me.mesh({ranks}, {"x"});
    for (const auto& one : all)
      for (size_t r = 0; r < one.rows.size(); r++) {
        const auto& row = one.rows[r];
        std::string why;
        try {
          std::vector<at::Tensor> leaves;
          for (size_t i = 0; i < row.size(); i++) {
            const auto& t = one.call.tensors()[i];
            const bool plain =
                std::count(one.sample.plain_args.begin(), one.sample.plain_args.end(), one.call.slots()[i].arg) > 0;
            if (plain) {
              leaves.push_back(t.clone());
              continue;
            }
            const auto& local = one.locals[r][i][static_cast<size_t>(me.rank)];
            const at::Tensor x =
                DTensor::from_local(local, mesh, {row[i]}, {.shape = t.sizes().vec(), .stride = t.strides().vec()});
            leaves.push_back(x.detach().set_requires_grad(takes_gradient(one.call, one.sample, i)));
          }
          const auto found = gradients_of(one.call, leaves);
          for (size_t i = 0; i < leaves.size() && why.empty(); i++) {
            const auto& want = one.gradients[i];
            if (!want.defined() && (found.empty() || !found[i].defined())) continue;
            if (found.empty() || !want.defined() || !found[i].defined()) {
              why = c10::str("only one of plain and distributed tensor ", i, " has a gradient");
              continue;
            }
            why = difference(want, is_dtensor(found[i]) ? DTensor(found[i]).full_tensor() : found[i]);
            if (!why.empty()) why = c10::str("gradient of tensor ", i, ": ", why);
          }
        } catch (const c10::Error& e) {
          why = c10::str("threw: ", e.msg());
        }
        if (!why.empty() && me.rank == 0)
          report.wrong.push_back(
              c10::str(one.sample.op, "  ", to_string(PlacementsRef(row)), " on ", ranks, " ranks: ", why));
      }
  });
  return report;
}

}  // namespace tessera::testing
