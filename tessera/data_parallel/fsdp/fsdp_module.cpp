#include "tessera/data_parallel/fsdp/fsdp_module.h"

#include "tessera/base/error.h"
#include "tessera/comm/world.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/data_parallel/fsdp/detail/engine/trace_state.h"
#include "tessera/nn/module_tree.h"

namespace tessera {

using data_parallel::fsdp::find_sharded_module;
using data_parallel::fsdp::find_sharded_modules;
using data_parallel::fsdp::ScheduledGroup;
using data_parallel::fsdp::snapshot_in_traced_step;

void ReshardAfterForward::apply(ScheduledGroup& scheduled, const comm::Group& shard_group) const {
  const int64_t all = shard_group->size(), n = ranks_.value_or(all);
  TESSERA_CHECK(n >= 1 && n <= all && all % n == 0, UsageError, "reshard_after_forward = ", n,
                ": parameters are sharded over ", all, " ranks; give a number that divides it");
  scheduled.reshard_after_forward = ranks_ ? std::optional(n > 1) : reshard_;
  scheduled.reshard_group = {};
  if (n == 1 || n == all) return;
  // ranks 0 1 2 3, n = 2: groups {0 1} {2 3}
  const auto first = shard_group->ranks().begin() + shard_group->rank() / n * n;
  scheduled.reshard_group = World::current().shared_group(std::vector<int64_t>(first, first + n));
}

void UnshardHandle::wait() {
  if (scheduled_) scheduled_->group->wait_for_unshard();
  scheduled_.reset();
}

FSDPModule::FSDPModule(std::shared_ptr<data_parallel::fsdp::ShardedModule> state, torch::nn::Module& module)
    : state_(std::move(state)), module_(&module) {}

FSDPModule fsdp_module(torch::nn::Module& module) {
  auto state = find_sharded_module(module);
  TESSERA_CHECK(state, UsageError, class_name(module), " was not given to fully_shard");
  return {std::move(state), module};
}

template <class F>
void FSDPModule::for_each(bool recurse, F f) {
  const auto apply = [&](const std::shared_ptr<ScheduledGroup>& scheduled) {
    snapshot_in_traced_step(scheduled);
    f(*scheduled);
  };
  if (!recurse) return apply(state_->scheduled);
  for (const auto& sharded : find_sharded_modules(*module_)) apply(sharded->scheduled);
}

UnshardHandle FSDPModule::unshard(bool async_op) {
  snapshot_in_traced_step(state_->scheduled);
  UnshardHandle handle(state_->scheduled);
  state_->group().unshard();
  if (!async_op) handle.wait();
  return handle;
}

void FSDPModule::reshard() {
  snapshot_in_traced_step(state_->scheduled);
  state_->group().reshard();
}

void FSDPModule::set_requires_gradient_sync(bool sync, bool recurse) {
  for_each(recurse, [&](ScheduledGroup& scheduled) { scheduled.sync = scheduled.all_reduce = sync; });
}
void FSDPModule::set_requires_all_reduce(bool all_reduce, bool recurse) {
  for_each(recurse, [&](ScheduledGroup& scheduled) { scheduled.all_reduce = all_reduce; });
}
void FSDPModule::set_reshard_after_forward(bool reshard, bool recurse) {
  for_each(recurse, [&](ScheduledGroup& scheduled) {
    ReshardAfterForward(reshard).apply(scheduled, scheduled.group->shard_group());
  });
}
void FSDPModule::set_reshard_after_backward(bool reshard, bool recurse) {
  for_each(recurse, [&](ScheduledGroup& scheduled) { scheduled.reshard_after_backward = reshard; });
}
void FSDPModule::set_is_last_backward(bool last) {
  snapshot_in_traced_step(state_->scheduled);
  (state_->schedule ? state_->schedule->root() : *state_->scheduled).is_last_backward = last;
}

namespace {

std::vector<std::weak_ptr<ScheduledGroup>> scheduled_groups_of(
    const std::vector<std::reference_wrapper<torch::nn::Module>>& modules) {
  std::vector<std::weak_ptr<ScheduledGroup>> groups;
  for (const auto& module : modules) {
    const auto state = find_sharded_module(module.get());
    TESSERA_CHECK(state, UsageError, "cannot prefetch ", class_name(module.get()), ": it was not given to fully_shard");
    groups.push_back(state->scheduled);
  }
  return groups;
}

}  // namespace

void FSDPModule::set_modules_to_forward_prefetch(
    const std::vector<std::reference_wrapper<torch::nn::Module>>& modules) {
  state_->scheduled->forward_prefetch = scheduled_groups_of(modules);
}
void FSDPModule::set_modules_to_backward_prefetch(
    const std::vector<std::reference_wrapper<torch::nn::Module>>& modules) {
  state_->scheduled->backward_prefetch = scheduled_groups_of(modules);
}
void FSDPModule::set_gradient_divide_factor(double factor) {
  TESSERA_CHECK(factor > 0, UsageError, "set_gradient_divide_factor(", factor, "): the factor must be above 0");
  state_->group().gradients().set_divide_factor(factor);
}
void FSDPModule::set_custom_all_gather(std::shared_ptr<AllGather> comm) {
  state_->group().set_custom_all_gather(std::move(comm));
}
void FSDPModule::set_custom_reduce_scatter(std::shared_ptr<ReduceScatter> comm) {
  state_->group().gradients().hooks().custom_reduce_scatter = std::move(comm);
}
void FSDPModule::set_all_reduce_hook(std::function<void(at::Tensor& reduced)> hook) {
  state_->group().gradients().hooks().after_reduction = std::move(hook);
}
void FSDPModule::set_unshard_in_backward(bool unshard) { state_->scheduled->unshard_in_backward = unshard; }
void FSDPModule::reset_iter_state() {
  if (state_->schedule) state_->schedule->abandon();
}

Tensors detail::run_as_forward(torch::nn::Module& module, const Tensors& inputs,
                               const std::function<Tensors(const Tensors&)>& call) {
  const auto state = find_sharded_module(module);
  return state ? data_parallel::fsdp::run(*state, module, inputs, call) : call(inputs);
}

}  // namespace tessera
