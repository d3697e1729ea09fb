#include "tessera/data_parallel/virtual_shards.h"

#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/data_parallel/fsdp/fsdp_module.h"
#include "tessera/numerics/detail/mesh_sum.h"
#include "tessera/numerics/detail/shard_batch.h"
#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/tracing/detail/invariant_scope.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <unordered_map>

namespace tessera {
namespace {

using data_parallel::NamedTensors;
using data_parallel::fsdp::ParamGroup;
using numerics::open_shard_batch;
using numerics::SumStep;
using Gradients = std::vector<at::Tensor>;  // local: one per parameter, then those of separate uses

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

bool same_bits(const at::Tensor& l, const at::Tensor& r) {
  const auto x = l.contiguous(), y = r.contiguous();
  return x.sizes() == y.sizes() && std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

// One forward and backward: virtual shards of this rank, and their part in the sum.
struct ShardPass {
  SumStep step;
  bool compares = false;   // computes virtual shards again, at once or with a part of the tokens, and compares
  bool full_rows = false;  // computes a virtual shard with all tokens, for such a comparison
};

// One part of each length above 1.
std::vector<SumStep> compared_parts(const std::vector<SumStep>& parts) {
  std::set<int64_t> lengths = {1};
  std::vector<SumStep> first;
  for (const auto& step : parts)
    if (lengths.insert(step.end - step.begin).second) first.push_back(step);
  return first;
}

// The sums of a stack machine (SumStep), and of the nodes that are compared.
template <class Value, class Add>
struct StepSums {
  std::vector<std::pair<IndexRange, Value>> stack = {};
  std::vector<Value> subtrees = {};
  // Calls on_node(range, sum) for each node that is complete.
  template <class OnNode>
  void push(const SumStep& step, Value sum, Add add, OnNode on_node) {
    IndexRange range{step.begin, step.end};
    on_node(range, sum);
    for (int merge = 0; merge < step.merges; merge++) {
      sum = add(std::move(stack.back().second), sum);
      range.begin = stack.back().first.begin;
      stack.pop_back();
      on_node(range, sum);
    }
    if (step.subtree < 0)
      stack.emplace_back(range, std::move(sum));
    else
      subtrees.push_back(std::move(sum));
  }
};

}  // namespace

struct VirtualShards::State {
  NamedTensors parameters;  // that require a gradient
  std::vector<ShardedParam> sharded;
  std::vector<std::shared_ptr<data_parallel::fsdp::ShardedModule>> modules;
  DataRanks ranks;
  int64_t count = 0;
  IndexRange owned{0, 0};
  std::vector<ShardPass> passes, made;              // of this step, and of the last one that is reduced
  std::vector<SumStep> one_by_one, parts;           // the steps of one virtual shard each, and of at most at_once
  std::vector<numerics::RecordedSum> known;         // the sums of one virtual shard
  std::vector<numerics::RecordedSum> of_full_rows;  // the same with all tokens
  comm::Group context;                              // whose ranks have parts of the tokens; null: none
  std::vector<size_t> separate;                     // the parameter of each separate use
  std::optional<numerics::ShardBatch> batch;        // of the pass that has begun
  std::vector<IndexRange> ranges;                   // complete subtrees of all ranks, in the order of the rows
  std::vector<int64_t> order;                       // their positions after an all-gather in the order of the group
  std::vector<int64_t> counts;                      // per rank of the group
  size_t next_pass = 0;
  StepSums<Gradients, Gradients (*)(Gradients, const Gradients&)> sums = {};
  std::vector<std::pair<IndexRange, Gradients>> compared = {};  // nodes that were computed one by one
  Gradients last;           // .grad that reduce_gradients() has set, of parameters without fully_shard()
  size_t trace_serial = 0;  // the traced step that has a snapshot of this state

  int64_t shards_per_rank() const { return count / ranks.size(); }
  IndexRange owned_by(int64_t number) const { return {number * shards_per_rank(), (number + 1) * shards_per_rank()}; }
  void plan(int64_t at_once);
  static void snapshot_in_traced_step(const std::shared_ptr<State>& state);
  void begin_pass(size_t i, int64_t tokens);
  void end_pass();
  Gradients take_gradients();
  void compare(const ShardPass& pass, const Gradients& at_once) const;
  at::Tensor sum_over_ranks(const at::Tensor& mine) const;
};

void VirtualShards::State::plan(int64_t at_once) {
  owned = owned_by(ranks.mine);
  one_by_one = numerics::part_steps(count, owned, 1);
  // Wrappers may communicate in a pass, so all ranks have the same number of them.
  size_t passes_of_all = 0, compared_of_all = 0;
  for (const auto number : ranks.numbers)
    passes_of_all = std::max(passes_of_all, numerics::part_steps(count, owned_by(number), at_once).size());
  for (const auto number : ranks.numbers)
    compared_of_all = std::max(
        compared_of_all, compared_parts(numerics::part_steps(count, owned_by(number), at_once, passes_of_all)).size());
  parts = numerics::part_steps(count, owned, at_once, passes_of_all);
  if (context) {
    passes.push_back({one_by_one[0], false, true});
    passes.push_back({one_by_one[0], true});
  }
  for (const auto& step : one_by_one) passes.push_back({step});
  auto again = compared_parts(parts);
  for (size_t i = 0; i < compared_of_all; i++) passes.push_back({again[i % again.size()], true});
  std::vector<std::pair<int64_t, int64_t>> begins;  // and the position in the group's order
  for (const auto number : ranks.numbers) {
    const auto subtrees = numerics::complete_subtrees(count, owned_by(number), numerics::kShortestOfShards);
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

// On first use inside a traced step: restores the state after the trace. A replay leaves what a step leaves.
void VirtualShards::State::snapshot_in_traced_step(const std::shared_ptr<State>& state) {
  if (!compiling() || state->trace_serial == CompilingScope::serial()) return;
  TESSERA_CHECK(state->passes.size() == state->parts.size(), UsageError,
                "VirtualShards: the first step compares bits of different passes over a virtual shard, which a ",
                "compiled step cannot do; make one step without compile() first, or compute one at a time");
  TESSERA_CHECK(state->next_pass == 0, UsageError, "VirtualShards: a compiled step begins at pass ", state->next_pass,
                "; compile the step from its first virtual shard to reduce_gradients()");
  state->trace_serial = CompilingScope::serial();
  CompilingScope::on_trace_end([state, made = state->made, last = state->last](bool finished) {
    const bool reduced = state->next_pass == 0 && state->sums.stack.empty() && state->sums.subtrees.empty();
    state->end_pass();
    state->next_pass = 0;
    state->sums = {};
    state->made = made;
    state->last = last;
    if (!finished) return;
    TESSERA_CHECK(reduced, UsageError,
                  "VirtualShards: a compiled step ends before reduce_gradients(); call it in the step");
    CompilingScope::on_replay([state] {
      state->made = state->passes;
      state->last.assign(state->parameters.size(), at::Tensor());
      for (size_t i = 0; i < state->last.size(); i++)
        if (!state->sharded[i].group) state->last[i] = state->parameters[i].value.grad();
    });
  });
}

// mine (subtrees of this rank, n) -> (n): each rank adds an equal part of the n sums, and all gather the parts.
at::Tensor VirtualShards::State::sum_over_ranks(const at::Tensor& mine) const {
  if (!ranks.group) return mine.select(0, 0);
  const auto& group = ranks.group;
  if (ranges.size() == 2 && group->size() == 2) return numerics::sum_over_two_ranks(mine.select(0, 0), group);
  const auto parts = split_evenly(mine.size(1), ranks.size());
  auto all = funcol::all_to_all(mine, 1, parts, 0, counts, group);
  funcol::wait(all, group);
  if (!std::is_sorted(order.begin(), order.end())) all = at::index_select(all, 0, at::tensor(order));
  auto sums = funcol::all_gather(numerics::add_subtrees(all, count, ranges, numerics::kShortestOfShards).contiguous(),
                                 0, parts, group);
  funcol::wait(sums, group);
  return sums;
}

// `tokens`: of a full row.
void VirtualShards::State::begin_pass(size_t i, int64_t tokens) {
  TESSERA_CHECK(i == next_pass && i < passes.size(), UsageError, "VirtualShards: rows() of pass ", i, ", and pass ",
                next_pass, " of ", passes.size(), " is next; call add_gradients() after the backward of each pass");
  if (batch && open_shard_batch() == &*batch) return;
  TESSERA_CHECK(!open_shard_batch(), UsageError,
                "VirtualShards: another VirtualShards has begun a pass on this thread; call its add_gradients() first");
  const auto& step = passes[i].step;
  const bool at_once = step.end - step.begin > 1;
  batch.emplace(numerics::ShardBatch{.count = count,
                                     .shards = {owned.begin + step.begin, owned.begin + step.end},
                                     .several = parts.size() < one_by_one.size(),
                                     .known = at_once ? &known : nullptr});
  if (context && !passes[i].full_rows) {
    TESSERA_CHECK(tokens % context->size() == 0, UsageError, "VirtualShards: rows have ", tokens,
                  " tokens, which are not divisible by ", context->size(), " ranks of context parallelism");
    batch->of_full_rows = &of_full_rows;
    batch->context = context;
    batch->tokens = tokens / context->size();
  }
  open_shard_batch() = &*batch;
}

void VirtualShards::State::end_pass() {
  if (batch && open_shard_batch() == &*batch) open_shard_batch() = nullptr;
  batch.reset();
}

// The local gradients of a pass, which are no longer .grad.
Gradients VirtualShards::State::take_gradients() {
  std::unordered_map<const ParamGroup*, std::vector<at::Tensor>> of_groups;
  for (const auto& sharded : modules) of_groups[&sharded->group()] = sharded->group().gradients().take_unsharded();
  Gradients gradients;
  for (size_t i = 0; i < parameters.size(); i++) {
    const auto& [name, parameter] = parameters[i];
    const auto& gradient = sharded[i].group ? of_groups.at(sharded[i].group)[sharded[i].index] : parameter.grad();
    TESSERA_CHECK(gradient.defined(), UsageError, "VirtualShards: parameter ", name,
                  " has no gradient of virtual shard ", owned.begin + static_cast<int64_t>(next_pass),
                  "; use it in every loss, or freeze it before VirtualShards is constructed");
    if (sharded[i].group) {
      gradients.push_back(gradient);
      continue;
    }
    TESSERA_CHECK(last.empty() || !last[i].defined() || !gradient.is_same(last[i]), UsageError,
                  "VirtualShards: .grad of parameter ", name,
                  " has the gradient of the last step too; call zero_grad() before the first virtual shard");
    gradients.push_back(data_parallel::local_gradient(parameter, name));
    parameter.mutable_grad().reset();
  }
  if (!batch) return gradients;
  std::vector<size_t> users;
  for (const auto& [weight, gradient] : batch->separate) {
    const auto found = std::find_if(parameters.begin(), parameters.end(),
                                    [&](const auto& p) { return p.value.unsafeGetTensorImpl() == weight; });
    TESSERA_CHECK(found != parameters.end(), UsageError,
                  "VirtualShards: a tied weight is not a parameter of the module that requires a gradient");
    const auto i = static_cast<size_t>(found - parameters.begin());
    const auto* group = sharded[i].group;
    const auto spec = group                      ? group->params()[sharded[i].index].unsharded_spec
                      : is_dtensor(found->value) ? tessera::detail::meta_of(found->value).spec
                                                 : SpecRef();
    gradients.push_back(data_parallel::local_gradient(gradient, spec, found->name));
    users.push_back(i);
  }
  TESSERA_CHECK(next_pass == 0 || users == separate, UsageError, "VirtualShards: virtual shards use tied weights ",
                separate.size(), " and ", users.size(), " times; every pass must use the same");
  separate = users;
  return gradients;
}

void VirtualShards::State::compare(const ShardPass& pass, const Gradients& at_once) const {
  const IndexRange range{pass.step.begin, pass.step.end};
  const auto node = std::find_if(compared.begin(), compared.end(), [&](const auto& n) { return n.first == range; });
  TESSERA_CHECK(node != compared.end(), InternalError, "virtual shards [", range.begin, ", ", range.end, ")");
  for (size_t i = 0; i < at_once.size(); i++)
    TESSERA_CHECK(
        same_bits(at_once[i], node->second[i]), UsageError, "VirtualShards: the gradient of parameter ",
        parameters[i < parameters.size() ? i : separate[i - parameters.size()]].name, " of ", range.end - range.begin,
        range.end - range.begin == 1
            ? " virtual shard has other bits on ranks that have parts of the tokens than on one that has all. Only "
              "attention may mix tokens, and the loss must be a sum over tokens."
            : " virtual shards at once has other bits than one by one. The loss must be a sum over rows, dim 0 of "
              "activations the batch, and each parameter used once; or compute one virtual shard at a time.");
}

VirtualShards::VirtualShards(torch::nn::Module& module, const DeviceMesh& data_mesh, int64_t count, int64_t at_once,
                             const DeviceMesh& context_mesh)
    : state_(std::make_shared<State>()) {
  auto& state = *state_;
  state.ranks = data_ranks_of(data_mesh);
  state.count = count;
  TESSERA_CHECK(count > 0 && count % state.ranks.size() == 0, UsageError, "VirtualShards: ", count,
                " virtual shards on ", state.ranks.size(), " ranks; each rank must have the same number of them");
  TESSERA_CHECK(at_once > 0, UsageError, "VirtualShards: at_once is ", at_once, "; it must be positive");
  if (context_mesh && context_mesh.size() > 1) state.context = context_mesh.get_group();
  state.plan(at_once);
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

VirtualShards::~VirtualShards() { state_->end_pass(); }

int64_t VirtualShards::count() const { return state_->count; }
int64_t VirtualShards::local_count() const { return static_cast<int64_t>(state_->passes.size()); }
bool VirtualShards::takes_full_rows(int64_t i) const {
  return !state_->context || state_->passes.at(static_cast<size_t>(i)).full_rows;
}
int64_t VirtualShards::first() const { return state_->owned.begin; }

at::Tensor VirtualShards::rows(const at::Tensor& rows_of_rank, int64_t i) const {
  const int64_t shards = state_->shards_per_rank(), rows = rows_of_rank.size(0);
  TESSERA_CHECK(rows % shards == 0, UsageError, "VirtualShards: this rank has ", rows, " rows and ", shards,
                " virtual shards; the global batch must be a multiple of ", count(), " rows");
  State::snapshot_in_traced_step(state_);
  state_->begin_pass(static_cast<size_t>(i), rows_of_rank.dim() > 1 ? rows_of_rank.size(1) : 1);
  const auto& step = state_->passes[static_cast<size_t>(i)].step;
  return rows_of_rank.narrow(0, step.begin * (rows / shards), (step.end - step.begin) * (rows / shards));
}

void VirtualShards::add_gradients() {
  auto& state = *state_;
  const at::NoGradGuard no_grad;
  TESSERA_CHECK(state.next_pass < state.passes.size(), UsageError, "VirtualShards: this rank has ", local_count(),
                " virtual shards, and their gradients are added; call reduce_gradients()");
  const auto& pass = state.passes[state.next_pass];
  TESSERA_CHECK(state.parts.size() == state.one_by_one.size() || state.batch, UsageError,
                "VirtualShards: the pass has not begun; take its rows by rows()");
  auto gradients = state.take_gradients();
  if (pass.full_rows) {
    state.of_full_rows = std::move(state.batch->recorded);
    state.compared.emplace_back(IndexRange{pass.step.begin, pass.step.end}, std::move(gradients));
    state.end_pass();
    state.next_pass++;
    return;
  }
  if (state.batch && pass.step.end - pass.step.begin == 1) {
    TESSERA_CHECK(!state.batch->several || state.known.empty() || state.batch->recorded == state.known, UsageError,
                  "VirtualShards: virtual shards are computed by different ops, and at_once needs the same; use 1");
    state.known = std::move(state.batch->recorded);
  } else if (state.batch) {
    TESSERA_CHECK(state.batch->recorded.size() == state.known.size(), UsageError,
                  "VirtualShards: ", state.batch->recorded.size(), " sums of virtual shards at once, and ",
                  state.known.size(), " of one; compute one virtual shard at a time");
  }
  state.end_pass();
  state.next_pass++;
  const InvariantScopePaused paused;  // these additions are the tree
  if (pass.compares) return state.compare(pass, gradients);
  const auto add = [](Gradients left, const Gradients& right) {
    for (size_t i = 0; i < left.size(); i++) left[i].add_(right[i]);
    return left;
  };
  state.sums.push(pass.step, std::move(gradients), add, [&](const IndexRange& range, const Gradients& sum) {
    for (auto i = state.next_pass; i < state.passes.size(); i++) {  // those that compare are behind the others
      const auto& later = state.passes[i];
      if (!later.compares || IndexRange{later.step.begin, later.step.end} != range) continue;
      Gradients copies;
      for (const auto& t : sum) copies.push_back(t.clone());
      state.compared.emplace_back(range, std::move(copies));
    }
  });
}

void VirtualShards::reduce_gradients() {
  auto& state = *state_;
  const at::NoGradGuard no_grad;
  TESSERA_CHECK(state.next_pass == state.passes.size(), UsageError, "VirtualShards: add_gradients() was called for ",
                state.next_pass, " of ", local_count(), " virtual shards of this rank");
  state.next_pass = 0;
  state.compared.clear();
  state.made = std::exchange(state.passes, {});
  for (const auto& step : state.parts) state.passes.push_back({step});
  const auto subtrees = std::exchange(state.sums.subtrees, {});
  const InvariantScopePaused paused;
  const at::AutoDispatchBelowADInplaceOrView below;  // .grad is not a view
  Gradients sums(subtrees[0].size());
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
    std::vector<at::Tensor> rows;
    for (size_t s = 0; s < subtrees.size(); s++) {
      std::vector<at::Tensor> flat;
      for (const auto i : these) flat.push_back(flat_of(subtrees[s][i]));
      rows.push_back(at::cat(flat));
    }
    const auto all = state.sum_over_ranks(rows.size() == 1 ? rows[0].unsqueeze(0) : at::stack(rows));
    int64_t offset = 0;
    for (const auto i : these) {
      const auto& like = subtrees[0][i];
      sums[i] = all.narrow(0, offset, like.numel()).view(like.sizes());
      offset += like.numel();
    }
    rest = std::move(others);
  }
  for (size_t s = 0; s < state.separate.size(); s++) sums[state.separate[s]].add_(sums[state.parameters.size() + s]);
  sums.resize(state.parameters.size());
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
  TESSERA_CHECK(values.dim() >= 1 && values.size(0) == static_cast<int64_t>(state.made.size()), UsageError,
                "VirtualShards: sum() takes ", state.made.size(), " values, one per pass of the step that ",
                "reduce_gradients() has ended; found sizes ", values.sizes());
  const InvariantScopePaused paused;
  StepSums<at::Tensor, at::Tensor (*)(at::Tensor, const at::Tensor&)> sums;
  std::vector<std::pair<IndexRange, at::Tensor>> nodes;
  for (size_t i = 0; i < state.made.size(); i++) {
    const auto& [step, compares, full_rows] = state.made[i];
    const auto value = values.select(0, static_cast<int64_t>(i)).detach().reshape({-1});
    const IndexRange shards{step.begin, step.end};
    if (full_rows) {
      nodes.emplace_back(shards, value);
      continue;
    }
    if (!compares) {
      sums.push(
          step, value, [](at::Tensor left, const at::Tensor& right) { return left + right; },
          [&](const IndexRange& range, const at::Tensor& sum) { nodes.emplace_back(range, sum); });
      continue;
    }
    const auto node = std::find_if(nodes.begin(), nodes.end(), [&](const auto& n) { return n.first == shards; });
    TESSERA_CHECK(node != nodes.end() && same_bits(node->second, value), UsageError,
                  "VirtualShards: sum() of values whose bits depend on how many virtual shards are computed at once; ",
                  "pass sums over rows, before they are multiplied by a number");
  }
  const auto& subtrees = sums.subtrees;
  return state.sum_over_ranks(at::stack(subtrees)).view(values.sizes().slice(1));
}

}  // namespace tessera
