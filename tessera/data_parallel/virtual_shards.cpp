#include "tessera/data_parallel/virtual_shards.h"

#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/data_parallel/fsdp/fsdp_module.h"
#include "tessera/numerics/detail/kernels.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>

namespace tessera {
namespace {

using data_parallel::NamedTensors;
using data_parallel::fsdp::ParamGroup;
using numerics::SumStep;
using Gradients = std::vector<at::Tensor>;  // one per parameter, local

// Where a parameter is in fully_shard()'s groups.
struct ShardedParam {
  ParamGroup* group = nullptr;
  size_t index = 0;
};

// The ranks with different rows: a group, and the number of each of its ranks in the order of the rows.
struct DataRanks {
  comm::Group group;  // null: one rank has all rows
  std::vector<int64_t> numbers = {0};
  int64_t mine = 0;
  int64_t size() const { return static_cast<int64_t>(numbers.size()); }
};

DataRanks data_ranks_of(const DeviceMesh& mesh) {
  DataRanks ranks;
  if (!mesh || mesh.size() == 1) return ranks;
  std::vector<int64_t> axes(static_cast<size_t>(mesh.ndim()));
  std::iota(axes.begin(), axes.end(), 0);
  ranks.group = mesh.state()->joint_group(axes);
  ranks.numbers.clear();
  const auto& in_order = mesh.ranks();
  for (const auto rank : ranks.group->ranks())
    ranks.numbers.push_back(std::find(in_order.begin(), in_order.end(), rank) - in_order.begin());
  ranks.mine = ranks.numbers[static_cast<size_t>(ranks.group->rank())];
  return ranks;
}

// `length` split over `parts`, as evenly as possible.
std::vector<int64_t> split_evenly(int64_t length, int64_t parts) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < parts; i++) sizes.push_back(length * (i + 1) / parts - length * i / parts);
  return sizes;
}

at::Tensor flat_of(const at::Tensor& t) { return t.contiguous().view({-1}); }

}  // namespace

struct VirtualShards::State {
  NamedTensors parameters;  // that require a gradient
  std::vector<ShardedParam> sharded;
  std::vector<std::shared_ptr<data_parallel::fsdp::ShardedModule>> modules;
  DataRanks ranks;
  int64_t count = 0;
  IndexRange owned{0, 0};
  std::vector<SumStep> steps;
  std::vector<IndexRange> ranges;  // complete subtrees of all ranks, in the order of the rows
  std::vector<int64_t> order;      // their positions after an all-gather in the order of the group
  std::vector<int64_t> counts;     // per rank of the group
  size_t next_step = 0;
  std::vector<Gradients> stack, subtrees;
  Gradients last;  // .grad that reduce_gradients() has set, of parameters without fully_shard()

  int64_t shards_per_rank() const { return count / ranks.size(); }
  IndexRange owned_by(int64_t number) const { return {number * shards_per_rank(), (number + 1) * shards_per_rank()}; }
  void plan();
  at::Tensor sum_over_ranks(const at::Tensor& mine) const;
};

void VirtualShards::State::plan() {
  owned = owned_by(ranks.mine);
  steps = numerics::sum_steps(count, owned, 1);
  std::vector<std::pair<int64_t, int64_t>> begins;  // and the position in the group's order
  for (const auto number : ranks.numbers) {
    const auto subtrees = numerics::complete_subtrees(count, owned_by(number));
    counts.push_back(static_cast<int64_t>(subtrees.size()));
    for (const auto& range : subtrees) {
      begins.emplace_back(range.begin, static_cast<int64_t>(begins.size()));
      ranges.push_back(range);
    }
  }
  std::sort(begins.begin(), begins.end());
  for (const auto& [begin, position] : begins) order.push_back(position);
  std::sort(ranges.begin(), ranges.end(), [](const auto& l, const auto& r) { return l.begin < r.begin; });
}

// mine (subtrees of this rank, n) -> (n): each rank adds an equal part of the n sums, and all gather the parts.
at::Tensor VirtualShards::State::sum_over_ranks(const at::Tensor& mine) const {
  if (!ranks.group) return mine.select(0, 0);
  const auto& group = ranks.group;
  const auto parts = split_evenly(mine.size(1), ranks.size());
  auto all = funcol::all_to_all(mine, 1, parts, 0, counts, group);
  funcol::wait(all, group);
  if (!std::is_sorted(order.begin(), order.end())) all = at::index_select(all, 0, at::tensor(order));
  auto sums = funcol::all_gather(numerics::add_subtrees(all, count, ranges).contiguous(), 0, parts, group);
  funcol::wait(sums, group);
  return sums;
}

VirtualShards::VirtualShards(torch::nn::Module& module, const DeviceMesh& data_mesh, int64_t count)
    : state_(std::make_unique<State>()) {
  auto& state = *state_;
  state.ranks = data_ranks_of(data_mesh);
  state.count = count;
  TESSERA_CHECK(count > 0 && count % state.ranks.size() == 0, UsageError, "VirtualShards: ", count,
                " virtual shards on ", state.ranks.size(), " ranks; each rank must have the same number of them");
  state.plan();
  std::unordered_map<const void*, ShardedParam> of_tensor;
  state.modules = data_parallel::fsdp::find_sharded_modules(module);
  for (const auto& sharded : state.modules) {
    auto& group = sharded->group();
    TESSERA_CHECK(!group.options().flat_parameter, UsageError,
                  "VirtualShards: FullyShardedDataParallel has flat parameters, whose gradients are not those of the "
                  "model's parameters; use fully_shard()");
    for (size_t i = 0; i < group.params().size(); i++)
      of_tensor[group.params()[i].tensor.unsafeGetTensorImpl()] = {&group, i};
  }
  for (const auto& item : module.named_parameters()) {
    if (!item.value().requires_grad()) continue;
    state.parameters.push_back({item.key(), item.value()});
    const auto found = of_tensor.find(item.value().unsafeGetTensorImpl());
    state.sharded.push_back(found == of_tensor.end() ? ShardedParam() : found->second);
  }
  for (const auto& sharded : state.modules) {
    auto& scheduled = *sharded->scheduled;
    scheduled.sync = scheduled.all_reduce = false;
    scheduled.reshard_after_forward = scheduled.reshard_after_backward = false;
  }
}

VirtualShards::~VirtualShards() = default;

int64_t VirtualShards::count() const { return state_->count; }
int64_t VirtualShards::local_count() const { return state_->shards_per_rank(); }
int64_t VirtualShards::first() const { return state_->owned.begin; }

at::Tensor VirtualShards::rows(const at::Tensor& rows_of_rank, int64_t i) const {
  const int64_t shards = local_count(), rows = rows_of_rank.size(0);
  TESSERA_CHECK(rows % shards == 0, UsageError, "VirtualShards: this rank has ", rows, " rows and ", shards,
                " virtual shards; the global batch must be a multiple of ", count(), " rows");
  return rows_of_rank.narrow(0, i * (rows / shards), rows / shards);
}

void VirtualShards::add_gradients() {
  auto& state = *state_;
  const at::NoGradGuard no_grad;
  TESSERA_CHECK(state.next_step < state.steps.size(), UsageError, "VirtualShards: this rank has ", local_count(),
                " virtual shards, and their gradients are added; call reduce_gradients()");
  Gradients sum;
  for (size_t i = 0; i < state.parameters.size(); i++) {
    const auto& [name, parameter] = state.parameters[i];
    TESSERA_CHECK(parameter.grad().defined(), UsageError, "VirtualShards: parameter ", name,
                  " has no gradient of virtual shard ", first() + static_cast<int64_t>(state.next_step),
                  "; use it in every loss, or freeze it before VirtualShards is constructed");
    TESSERA_CHECK(state.last.empty() || !state.last[i].defined() || !parameter.grad().is_same(state.last[i]),
                  UsageError, "VirtualShards: .grad of parameter ", name,
                  " has the gradient of the last step too; call zero_grad() ", "before the first virtual shard");
    // fully_shard() shows the local unsharded gradient.
    sum.push_back(state.sharded[i].group ? parameter.grad() : data_parallel::local_gradient(parameter, name));
    parameter.mutable_grad().reset();
  }
  const OpModesOff no_modes;  // additions of equal tensors are exact
  const auto& step = state.steps[state.next_step++];
  for (int merge = 0; merge < step.merges; merge++) {
    auto left = std::move(state.stack.back());
    state.stack.pop_back();
    for (size_t i = 0; i < sum.size(); i++) left[i].add_(sum[i]);
    sum = std::move(left);
  }
  (step.subtree < 0 ? state.stack : state.subtrees).push_back(std::move(sum));
}

void VirtualShards::reduce_gradients() {
  auto& state = *state_;
  const at::NoGradGuard no_grad;
  TESSERA_CHECK(state.next_step == state.steps.size(), UsageError, "VirtualShards: add_gradients() was called for ",
                state.next_step, " of ", local_count(), " virtual shards of this rank");
  state.next_step = 0;
  const auto subtrees = std::exchange(state.subtrees, {});
  const OpModesOff no_modes;
  const at::AutoDispatchBelowADInplaceOrView below;  // .grad is not a view
  Gradients sums(state.parameters.size());
  std::vector<size_t> rest(sums.size());
  std::iota(rest.begin(), rest.end(), 0);
  if (!state.ranks.group) {
    sums = subtrees[0];
    rest.clear();
  }
  while (!rest.empty()) {  // one collective per dtype
    const auto dtype = subtrees[0][rest[0]].scalar_type();
    std::vector<size_t> others, these;
    for (const auto i : rest) (subtrees[0][i].scalar_type() == dtype ? these : others).push_back(i);
    std::vector<at::Tensor> mine;
    for (const auto& subtree : subtrees) {
      std::vector<at::Tensor> flat;
      for (const auto i : these) flat.push_back(flat_of(subtree[i]));
      mine.push_back(at::cat(flat));
    }
    const auto all = state.sum_over_ranks(at::stack(mine));
    int64_t offset = 0;
    for (const auto i : these) {
      const auto& like = subtrees[0][i];
      sums[i] = all.narrow(0, offset, like.numel()).view(like.sizes());
      offset += like.numel();
    }
    rest = std::move(others);
  }
  state.last.assign(sums.size(), at::Tensor());
  for (size_t i = 0; i < sums.size(); i++) {
    if (state.sharded[i].group) continue;
    data_parallel::set_local_gradient(state.parameters[i].value, sums[i]);
    state.last[i] = state.parameters[i].value.grad();
  }
  for (const auto& sharded : state.modules) {
    auto& group = sharded->group();
    Gradients unsharded(group.params().size());
    for (size_t i = 0; i < sums.size(); i++)
      if (state.sharded[i].group == &group) unsharded[state.sharded[i].index] = sums[i];
    group.gradients().set_reduced(unsharded);
  }
}

at::Tensor VirtualShards::sum(const at::Tensor& values) const {
  auto& state = *state_;
  const at::NoGradGuard no_grad;
  TESSERA_CHECK(values.dim() >= 1 && values.size(0) == local_count(), UsageError, "VirtualShards: sum() takes ",
                local_count(), " values, one per virtual shard of this rank; found sizes ", values.sizes());
  const OpModesOff no_modes;
  std::vector<at::Tensor> stack, subtrees;
  for (size_t s = 0; s < state.steps.size(); s++) {
    auto sum = values.select(0, static_cast<int64_t>(s)).detach();
    for (int merge = 0; merge < state.steps[s].merges; merge++) {
      sum = stack.back() + sum;
      stack.pop_back();
    }
    (state.steps[s].subtree < 0 ? stack : subtrees).push_back(sum.reshape({-1}));
  }
  return state.sum_over_ranks(at::stack(subtrees)).view(values.sizes().slice(1));
}

}  // namespace tessera
