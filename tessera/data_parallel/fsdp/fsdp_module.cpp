#include "tessera/data_parallel/fsdp/fsdp_module.h"

#include "tessera/base/error.h"
#include "tessera/comm/world.h"
#include "tessera/data_parallel/fsdp/detail/engine/compiled_step.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/nn/module_tree.h"

namespace tessera {

using namespace data_parallel::fsdp;

void ReshardAfterForward::apply(Turn& turn, const comm::Group& shards) const {
  const int64_t all = shards->size(), n = ranks_.value_or(all);
  TESSERA_CHECK(n >= 1 && n <= all && all % n == 0, UsageError, "reshard_after_forward = ", n,
                ": parameters are cut over ", all, " ranks, which that does not divide");
  turn.reshard_after_forward = ranks_ ? std::optional(n > 1) : yes_;
  turn.few = {};
  if (n == 1 || n == all) return;
  // ranks 0 1 2 3, n = 2: groups {0 1} {2 3}
  const auto first = shards->ranks().begin() + shards->rank() / n * n;
  turn.few = World::current().shared_group(std::vector<int64_t>(first, first + n));
}

void UnshardHandle::wait() {
  if (turn_) turn_->unit->open();
  turn_.reset();
}

FSDPModule::FSDPModule(std::shared_ptr<ShardedModule> state, torch::nn::Module& module)
    : state_(std::move(state)), module_(&module) {}

FSDPModule fsdp_module(torch::nn::Module& module) {
  auto state = find(module);
  TESSERA_CHECK(state, UsageError, class_name(module), " was not given to fully_shard");
  return {std::move(state), module};
}

template <class F>
void FSDPModule::for_each(bool recurse, F f) {
  const auto apply = [&](const std::shared_ptr<Turn>& turn) {
    note_in_compiled_step(turn);
    f(*turn);
  };
  if (!recurse) return apply(state_->turn);
  for (const auto& sharded : find_all(*module_)) apply(sharded->turn);
}

UnshardHandle FSDPModule::unshard(bool async_op) {
  note_in_compiled_step(state_->turn);
  UnshardHandle handle(state_->turn);
  state_->turn->unit->gather();
  if (!async_op) handle.wait();
  return handle;
}

void FSDPModule::reshard() {
  note_in_compiled_step(state_->turn);
  state_->turn->unit->close();
}

void FSDPModule::set_requires_gradient_sync(bool sync, bool recurse) {
  for_each(recurse, [&](Turn& turn) { turn.sync = turn.all_reduce = sync; });
}
void FSDPModule::set_requires_all_reduce(bool all_reduce, bool recurse) {
  for_each(recurse, [&](Turn& turn) { turn.all_reduce = all_reduce; });
}
void FSDPModule::set_reshard_after_forward(bool reshard, bool recurse) {
  for_each(recurse, [&](Turn& turn) { ReshardAfterForward(reshard).apply(turn, turn.unit->shards()); });
}
void FSDPModule::set_reshard_after_backward(bool reshard, bool recurse) {
  for_each(recurse, [&](Turn& turn) { turn.reshard_after_backward = reshard; });
}
void FSDPModule::set_is_last_backward(bool last) {
  note_in_compiled_step(state_->turn);
  (state_->schedule ? state_->schedule->root() : *state_->turn).is_last_backward = last;
}

namespace {

std::vector<std::weak_ptr<Turn>> turns_of(const std::vector<std::reference_wrapper<torch::nn::Module>>& modules) {
  std::vector<std::weak_ptr<Turn>> turns;
  for (const auto& module : modules) {
    const auto state = find(module.get());
    TESSERA_CHECK(state, UsageError, "prefetch of ", class_name(module.get()),
                  " is asked for, which was not given to fully_shard");
    turns.push_back(state->turn);
  }
  return turns;
}

}  // namespace

void FSDPModule::set_modules_to_forward_prefetch(
    const std::vector<std::reference_wrapper<torch::nn::Module>>& modules) {
  state_->turn->forward_prefetch = turns_of(modules);
}
void FSDPModule::set_modules_to_backward_prefetch(
    const std::vector<std::reference_wrapper<torch::nn::Module>>& modules) {
  state_->turn->backward_prefetch = turns_of(modules);
}
void FSDPModule::set_gradient_divide_factor(double factor) {
  TESSERA_CHECK(factor > 0, UsageError, "set_gradient_divide_factor(", factor, "): it must be above 0");
  state_->turn->unit->set_divide_factor(factor);
}
void FSDPModule::set_unshard_in_backward(bool unshard) { state_->turn->unshard_in_backward = unshard; }
void FSDPModule::reset_iter_state() {
  if (state_->schedule) state_->schedule->abandon();
}

Tensors detail::run_as_forward(torch::nn::Module& module, const Tensors& inputs,
                               const std::function<Tensors(const Tensors&)>& call) {
  const auto state = find(module);
  return state ? run(*state, module, inputs, call) : call(inputs);
}

}  // namespace tessera
