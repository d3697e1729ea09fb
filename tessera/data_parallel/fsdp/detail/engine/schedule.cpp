#include "tessera/data_parallel/fsdp/detail/engine/schedule.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/collective_label.h"
#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/fsdp/detail/engine/trace_state.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace tessera::data_parallel::fsdp {
namespace {

constexpr size_t kMaxReductions = 2;  // the newest reduce-scatter, and the all-reduce of the group before it

int current_graph_task() { return torch::autograd::get_current_graph_task_id(); }
bool in_backward() { return current_graph_task() != -1; }

bool has_frozen_param(const ParamGroup& group) {
  return std::any_of(group.params().begin(), group.params().end(),
                     [](const FSDPParam& param) { return !param.tensor.requires_grad(); });
}

template <class T>
bool contains(const std::vector<T>& list, T item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

}  // namespace

void Schedule::add(std::shared_ptr<ScheduledGroup> scheduled, std::string name) {
  scheduled->group->attach_to_schedule(
      {std::move(name), static_cast<int32_t>(groups_.size()), streams_, buffer_pool_, weak_from_this()});
  last_order_.push_back(scheduled.get());
  groups_.push_back(std::move(scheduled));
}

void Schedule::start() {
  for (const auto& scheduled : groups_) {
    const auto& group = *scheduled->group;
    if (group.params().empty()) continue;
    const auto prefix = group.index() == 0 ? "" : group.name() + ".";
    if (group.options().flat_parameter)
      params_.push_back({prefix + "flat_param", group.flat_param()});
    else
      for (const auto& param : group.params()) params_.push_back({prefix + param.name, param.tensor});
    for (const auto& ranks : {group.shard_group(), group.replicate_group()})
      if (ranks && !contains(comm_groups_, ranks)) comm_groups_.push_back(ranks);
  }
  frozen_.start(params_);
}

// Before an outermost forward: frees unsharded buffers whose shard was written to on some rank since the all-gather.
// The version counters that unshard() compares do not count writes through .data() or a local tensor, and ranks may
// disagree about them: an optimizer does not write to a shard that has only frozen or unused parameters.
void Schedule::discard_stale_buffers() {
  for (const auto& ranks : comm_groups_) {
    std::vector<ParamGroup*> kept;
    std::vector<at::Tensor> differs;
    for (const auto& scheduled : groups_) {
      auto& group = *scheduled->group;
      if (group.shard_group() != ranks) continue;
      group.forget_reshard_shard();
      if (!group.has_copy_of_shard()) group.free_stale_buffer();
      if (!group.has_copy_of_shard()) continue;
      if (compiling()) {  // a trace has no values to compare
        group.reshard();
        continue;
      }
      kept.push_back(&group);
      differs.push_back(group.shard_differs_from_buffer());
    }
    if (kept.empty()) continue;
    auto all = at::cat(differs);
    if (ranks->size() > 1) {
      const comm::CollectiveLabel label("unsharded buffers", static_cast<int32_t>(kept.size()));
      comm::all_reduce_(all, ReduceOp::Max, ranks);
      funcol::wait(all, ranks);
    }
    all = all.cpu();
    for (size_t i = 0; i < kept.size(); i++)
      if (all.data_ptr<int32_t>()[i]) kept[i]->reshard();
  }
}

ScheduledGroup* Schedule::neighbor(const ScheduledGroup& scheduled, int step) const {
  const auto& order = last_order_;
  const auto found = std::find(order.begin(), order.end(), &scheduled);
  if (found == order.end()) return nullptr;
  const auto at = (found - order.begin()) + step;
  return at < 0 || at >= static_cast<ptrdiff_t>(order.size()) ? nullptr : order[static_cast<size_t>(at)];
}

// Starts the all-gather of the next groups, except those that this pass has used already.
void Schedule::prefetch(ScheduledGroup& scheduled, const std::vector<std::weak_ptr<ScheduledGroup>>& requested,
                        int step) {
  std::vector<ScheduledGroup*> next;
  for (const auto& each : requested)
    if (const auto other = each.lock()) next.push_back(other.get());
  if (requested.empty())
    for (int n = 1; n <= scheduled.prefetch_depth; n++) next.push_back(neighbor(scheduled, step * n));
  for (auto* other : next) {
    if (!other) continue;
    const bool done =
        step > 0 ? contains(order_, other) : other->graph_task == graph_task_ || !other->unshard_in_backward;
    if (!done && !other->group->gradients().is_reducing()) other->group->unshard();
  }
}

// Snapshots all groups of the tree: a group whose module is not called may still be prefetched or resharded.
void Schedule::snapshot_in_traced_step() {
  if (std::exchange(trace_serial_, CompilingScope::serial()) != CompilingScope::serial())
    CompilingScope::on_trace_end([self = shared_from_this(), order = order_, last_order = last_order_](bool) {
      self->order_ = order;
      self->last_order_ = last_order;
      self->running_.clear();
      self->reducing_.clear();
      self->buffer_pool_->clear();
      self->forward_depth_ = 0;
      self->graph_task_ = -1;
    });
  for (const auto& scheduled : groups_) fsdp::snapshot_in_traced_step(scheduled);
}

void Schedule::before_forward(ScheduledGroup& scheduled) {
  if (in_backward()) return scheduled.group->wait_for_unshard();
  if (compiling()) snapshot_in_traced_step();
  if (forward_depth_++ == 0) {
    if (graph_task_ != -1) abandon(), forward_depth_ = 1;
    if (at::GradMode::is_enabled()) frozen_.check("the forward of a sharded module", params_, comm_groups_);
    discard_stale_buffers();
    if (&scheduled == &root()) order_.clear();  // otherwise a submodule runs by itself, for example after the model
  }
  if (!contains(running_, &scheduled)) running_.push_back(&scheduled);
  if (!contains(order_, &scheduled)) order_.push_back(&scheduled);
  scheduled.group->wait_for_unshard();
  if (scheduled.prefetch_forward || !scheduled.forward_prefetch.empty())
    prefetch(scheduled, scheduled.forward_prefetch, 1);
}

void Schedule::after_forward(ScheduledGroup& scheduled, const void* module, const Tensors& outputs) {
  if (in_backward()) return;
  forward_depth_--;
  bool has_graph = false;
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    has_graph = true;
    output.register_hook([self = shared_from_this(), at = &scheduled](const at::Tensor&) {
      self->before_backward(*at, /*needs_values=*/true);
    });
  }
  if (!contains(scheduled.modules_run, module)) scheduled.modules_run.push_back(module);
  if (scheduled.modules_run.size() == scheduled.num_modules) end_forward(scheduled, has_graph);
  if (forward_depth_ > 0) return;
  while (!running_.empty()) end_forward(*running_.back(), has_graph);  // not all of their modules were called
  last_order_ = order_;
  for (auto& other : groups_)
    if (!other->group->is_unsharded() && other->group->has_unsharded_buffer() && !contains(order_, other.get()))
      other->group->reshard();
  buffer_pool_->clear();
}

void Schedule::end_forward(ScheduledGroup& scheduled, bool has_graph) {
  std::erase(running_, &scheduled);
  scheduled.modules_run.clear();
  const bool reshard = scheduled.reshard_after_forward.value_or(&scheduled != &root());
  if (has_graph && (!reshard || scheduled.group->unsharded_aliases_shard())) return;
  if (has_graph && scheduled.reshard_group) return scheduled.group->reshard_to(scheduled.reshard_group);
  // reshard_after_forward = false without a backward: the next forward reuses the buffer.
  const bool keep_buffer = scheduled.reshard_after_forward && !reshard;
  keep_buffer ? scheduled.group->reshard_keep_buffer() : scheduled.group->reshard();
}

void Schedule::forward_failed() {
  if (in_backward()) return;
  if (forward_depth_ == 0 || --forward_depth_ == 0) abandon();
}

void Schedule::begin_graph_task(int graph_task) {
  if (graph_task_ == graph_task) return;
  if (graph_task_ != -1) abandon();
  graph_task_ = graph_task;
  // The callback runs at the end of this backward. If backward fails, autograd destroys the callback without a call.
  struct AbandonUnlessEnded {
    std::shared_ptr<Schedule> self;
    int graph_task;
    AbandonUnlessEnded(std::shared_ptr<Schedule> self, int graph_task)
        : self(std::move(self)), graph_task(graph_task) {}
    AbandonUnlessEnded(const AbandonUnlessEnded&) = delete;
    ~AbandonUnlessEnded() {
      if (self->graph_task_ == graph_task) self->abandon();
    }
  };
  auto at_end = std::make_shared<AbandonUnlessEnded>(shared_from_this(), graph_task);
  torch::autograd::Engine::get_default_engine().queue_callback([at_end] { at_end->self->end_backward(); });
}

void Schedule::before_backward(ParamGroup& group, bool needs_values) {
  if (in_backward()) before_backward(*groups_[static_cast<size_t>(group.index())], needs_values);
}

void Schedule::before_backward(ScheduledGroup& scheduled, bool needs_values) {
  auto& group = *scheduled.group;
  TESSERA_CHECK(!compiling() || scheduled.trace_serial == CompilingScope::serial(), UsageError, "parameter group ",
                group.name(),
                ": the backward of a sharded module cannot be compiled by itself; compile the entire step: "
                "compile(step)");
  begin_graph_task(current_graph_task());
  const bool first = scheduled.graph_task != graph_task_;
  if (!first && (!needs_values || group.is_unsharded())) return;
  if (first)  // a backward before this one was not the last and left its reduction in flight
    while (group.gradients().is_reducing() && !reducing_.empty()) finish_oldest_reduction();
  if (needs_values && scheduled.unshard_in_backward) group.wait_for_unshard();
  if (!first) return;
  scheduled.graph_task = graph_task_;
  group.gradients().begin_backward();
  // Later groups that are still unsharded have all their gradients; only their frozen parameters kept them unsharded.
  // If backward needs them again, they are unsharded again.
  bool is_later = false;
  for (auto* other : last_order_) {
    if (is_later && other->graph_task == graph_task_ && other->group->is_unsharded() &&
        !other->group->gradients().is_waiting())
      reshard_after_backward(*other);
    is_later |= other == &scheduled;
  }
  if (scheduled.prefetch_backward == BackwardPrefetch::Pre || !scheduled.backward_prefetch.empty())
    prefetch(scheduled, scheduled.backward_prefetch, -1);
}

void Schedule::reshard_after_backward(ScheduledGroup& scheduled) {
  scheduled.reshard_after_backward ? scheduled.group->reshard() : scheduled.group->reshard_keep_buffer();
}

void Schedule::gradients_ready(ParamGroup& group) { reduce_gradients(*groups_[static_cast<size_t>(group.index())]); }

void Schedule::reduce_gradients(ScheduledGroup& scheduled) {
  auto& gradients = scheduled.group->gradients();
  if (!has_frozen_param(*scheduled.group)) reshard_after_backward(scheduled);
  if (scheduled.prefetch_backward == BackwardPrefetch::Post) prefetch(scheduled, scheduled.backward_prefetch, -1);
  if (!scheduled.sync) return gradients.end_backward();
  start_reduction(scheduled);
}

void Schedule::start_reduction(ScheduledGroup& scheduled) {
  auto& gradients = scheduled.group->gradients();
  gradients.reduce_scatter(scheduled.all_reduce);
  if (!gradients.is_reducing()) return;
  for (auto* earlier : reducing_) earlier->group->gradients().all_reduce();
  reducing_.push_back(&scheduled);
  while (reducing_.size() > kMaxReductions || (reducing_.size() > 1 && !reducing_.front()->group->replicate_group()))
    finish_oldest_reduction();
}

void Schedule::finish_oldest_reduction() {
  auto* scheduled = reducing_.front();
  reducing_.pop_front();
  scheduled->group->gradients().wait_for_reduction();
}

void Schedule::end_backward() {
  for (auto& scheduled : groups_)
    if (scheduled->group->gradients().in_backward()) reduce_gradients(*scheduled);
  for (auto& scheduled : groups_) {
    auto& gradients = scheduled->group->gradients();
    if (!scheduled->sync && !compiling()) gradients.count_unsharded_pass();  // another rank may have used the group
    if (!scheduled->sync || !gradients.has_unreduced(scheduled->all_reduce)) continue;
    gradients.begin_backward();
    start_reduction(*scheduled);
  }
  while (root().is_last_backward && !reducing_.empty()) finish_oldest_reduction();
  for (auto& scheduled : groups_)
    if (scheduled->group->is_unsharded() || scheduled->reshard_after_backward) reshard_after_backward(*scheduled);
  buffer_pool_->clear();
  graph_task_ = -1;
}

void Schedule::abandon() {
  graph_task_ = -1;
  forward_depth_ = 0;
  running_.clear();
  reducing_.clear();
  for (auto& scheduled : groups_) {
    scheduled->modules_run.clear();
    scheduled->group->abandon();
  }
  buffer_pool_->clear();
}

}  // namespace tessera::data_parallel::fsdp
