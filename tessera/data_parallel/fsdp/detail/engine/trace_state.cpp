#include "tessera/data_parallel/fsdp/detail/engine/trace_state.h"

#include "tessera/base/error.h"
#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/tracing/detail/restart_trace.h"
#include "tessera/tracing/op_mode.h"

#include <bit>

namespace tessera::data_parallel::fsdp {
namespace {

// A hash of the values that describe a state.
class StateHash {
 public:
  void add(int64_t number) {
    value_ = (value_ ^ static_cast<uint64_t>(number)) * 0x9e3779b97f4a7c15;
    value_ ^= value_ >> 29;
  }
  void add(const void* address) { add(static_cast<int64_t>(reinterpret_cast<intptr_t>(address))); }
  void add(const at::Tensor& t) { add(t.defined() ? t.storage().unsafeGetStorageImpl() : nullptr); }
  int64_t value() const { return static_cast<int64_t>(value_); }

 private:
  uint64_t value_ = 0;
};

int64_t hash_settings(const ScheduledGroup& scheduled) {
  StateHash hash;
  hash.add(scheduled.reshard_after_forward ? *scheduled.reshard_after_forward : 2);
  hash.add(scheduled.reshard_group.get());
  for (const bool flag : {scheduled.reshard_after_backward, scheduled.unshard_in_backward, scheduled.sync,
                          scheduled.all_reduce, scheduled.is_last_backward, scheduled.prefetch_forward})
    hash.add(flag);
  hash.add(scheduled.prefetch_depth);
  hash.add(static_cast<int64_t>(scheduled.prefetch_backward));
  for (const auto* requested : {&scheduled.forward_prefetch, &scheduled.backward_prefetch}) {
    hash.add(static_cast<int64_t>(requested->size()));
    for (const auto& other : *requested) hash.add(other.lock().get());
  }
  return hash.value();
}

int64_t hash_state(const ScheduledGroup& scheduled) {
  StateHash hash;
  hash.add(hash_settings(scheduled));
  const auto& group = *scheduled.group;
  hash.add(group.is_unsharded());
  hash.add(group.has_new_values());
  const auto gradients = group.gradients().state();
  hash.add(std::bit_cast<int64_t>(gradients.divide_factor.value_or(0)));
  hash.add(gradients.deferred_all_reduce);
  for (const auto& gradient : gradients.unsharded_grads) hash.add(gradient);
  for (const auto* flags : {&gradients.ready, &gradients.deferred})
    for (const char flag : *flags) hash.add(flag);
  return hash.value();
}

}  // namespace

void snapshot_in_traced_step(const std::shared_ptr<ScheduledGroup>& scheduled) {
  if (!compiling() || scheduled->trace_serial == CompilingScope::serial()) return;
  auto& group = *scheduled->group;
  TESSERA_CHECK(CompilingScope::is_step(), UsageError, "parameter group ", group.name(),
                ": a sharded module (fully_shard, FullyShardedDataParallel) or its backward cannot be compiled by "
                "itself, because its collectives belong to the entire step; compile the step: compile(step)");
  TESSERA_CHECK(!group.is_unsharded(), UsageError, "parameter group ", group.name(),
                " is unsharded before the compiled step begins (after unshard(), or after a forward whose backward has "
                "not run); call reshard() on its module, or run such a forward under torch::NoGradGuard");
  {
    const OpModesOff not_recorded;
    if (group.take_new_values()) throw RestartTrace();
    group.reshard();  // every replay all-gathers into its own buffer
  }
  if (group.options().flat_parameter)
    for (const auto& param : group.params()) CompilingScope::add_inner_leaf(param.tensor.unsafeGetTensorImpl());
  CompilingScope::add_guard([scheduled] { return hash_state(*scheduled); });
  const auto gradients_before = group.gradients().state();
  {
    const OpModesOff not_recorded;
    group.gradients().take_unreduced();
  }
  const auto flat_param_grad = group.flat_param().defined() ? group.flat_param().grad() : at::Tensor();
  CompilingScope::on_trace_end(
      [scheduled, settings_before = *scheduled, gradients_before, flat_param_grad](bool finished) {
        auto& group = *scheduled->group;
        const ScheduledGroup settings_after = *scheduled;
        const auto gradients_after = group.gradients().state();
        const bool is_reducing = group.gradients().is_reducing();
        group.abandon();
        *scheduled = settings_before;
        group.gradients().restore(gradients_before);
        if (group.flat_param().defined() && !group.options().flat_parameter)
          group.flat_param().mutable_grad() = flat_param_grad;
        if (!finished) return;
        TESSERA_CHECK(!is_reducing, UsageError, "parameter group ", group.name(),
                      ": its gradients are still being reduced at the end of the compiled step "
                      "(set_is_last_backward(false)); call set_is_last_backward(true) before the step's last backward");
        CompilingScope::on_replay([scheduled, gradients_after] {
          scheduled->group->gradients().restore(gradients_after);
          scheduled->group->gradients().find_flat_param_grad();
        });
        if (hash_settings(settings_after) != hash_settings(settings_before))
          CompilingScope::on_replay([scheduled, settings_after] {
            const auto trace_serial = scheduled->trace_serial;
            *scheduled = settings_after;
            scheduled->trace_serial = trace_serial;
          });
      });
  scheduled->trace_serial = CompilingScope::serial();
}

void snapshot_in_traced_step(std::shared_ptr<void> owner, at::Tensor& tensor) {
  CompilingScope::add_guard([owner, at = &tensor] {
    StateHash hash;
    hash.add(*at);
    return hash.value();
  });
  CompilingScope::on_trace_end([owner = std::move(owner), at = &tensor, before = tensor](bool finished) {
    const auto after = std::exchange(*at, before);
    if (finished) CompilingScope::on_replay([owner, at, after] { *at = after; });
  });
}

}  // namespace tessera::data_parallel::fsdp
