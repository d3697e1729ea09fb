#include "tessera/data_parallel/fsdp/detail/engine/compiled_step.h"

#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/base/error.h"
#include "tessera/tracing/op_mode.h"
#include "tessera/tracing/detail/restart_trace.h"

#include <bit>

namespace tessera::data_parallel::fsdp {
namespace {

// Numbers of a state, in one.
class Mixed {
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

int64_t settings_of(const Turn& turn) {
  Mixed mixed;
  mixed.add(turn.reshard_after_forward ? *turn.reshard_after_forward : 2);
  mixed.add(turn.few.get());
  for (const bool flag : {turn.reshard_after_backward, turn.unshard_in_backward, turn.sync, turn.all_reduce,
                          turn.is_last_backward, turn.prefetch_forward})
    mixed.add(flag);
  mixed.add(turn.ahead);
  mixed.add(static_cast<int64_t>(turn.prefetch_backward));
  for (const auto* asked : {&turn.forward_prefetch, &turn.backward_prefetch}) {
    mixed.add(static_cast<int64_t>(asked->size()));
    for (const auto& other : *asked) mixed.add(other.lock().get());
  }
  return mixed.value();
}

int64_t state_of(const Turn& turn) {
  Mixed mixed;
  mixed.add(settings_of(turn));
  const auto& unit = *turn.unit;
  mixed.add(unit.is_open());
  mixed.add(unit.is_moved());
  const auto carried = unit.carried();
  mixed.add(std::bit_cast<int64_t>(carried.divide_factor.value_or(0)));
  mixed.add(carried.owed);
  for (const auto& gradient : carried.gradients) mixed.add(gradient);
  for (const auto* members : {&carried.came, &carried.owes})
    for (const char member : *members) mixed.add(member);
  return mixed.value();
}

}  // namespace

void note_in_compiled_step(const std::shared_ptr<Turn>& turn) {
  if (!compiling() || turn->compiled_in == CompilingScope::serial()) return;
  auto& unit = *turn->unit;
  TESSERA_CHECK(CompilingScope::is_step(), UsageError, "unit ", unit.name(),
                ": a sharded module (fully_shard, FullyShardedDataParallel) cannot be compiled by itself, nor its "
                "backward: gathering and reducing belong to the whole step; compile that: compile(step)");
  TESSERA_CHECK(!unit.is_open(), UsageError, "unit ", unit.name(),
                " is whole before the compiled step begins (after unshard(), or a forward whose backward is still to "
                "come); call reshard() on its module, or run such a forward under torch::NoGradGuard");
  {
    const OpModesOff not_of_the_step;
    if (unit.take_moved()) throw RestartTrace();
    unit.close();  // a buffer that was kept is gathered by the program, each time
  }
  if (unit.options().flat_parameter)
    for (const auto& member : unit.members()) CompilingScope::add_inner_leaf(member.handle.unsafeGetTensorImpl());
  CompilingScope::add_guard([turn] { return state_of(*turn); });
  const auto shard_gradient = unit.flat().defined() ? unit.flat().grad() : at::Tensor();
  CompilingScope::on_trace_end([turn, before = *turn, carried = unit.carried(), shard_gradient](bool finished) {
    auto& unit = *turn->unit;
    const Turn after = *turn;
    const auto left = unit.carried();
    const bool reducing = unit.reducing();
    unit.abandon();
    *turn = before;
    unit.carry(carried);
    if (unit.flat().defined() && !unit.options().flat_parameter) unit.flat().mutable_grad() = shard_gradient;
    if (!finished) return;
    TESSERA_CHECK(!reducing, UsageError, "unit ", unit.name(),
                  ": its gradients are still being reduced at the end of the compiled step "
                  "(set_is_last_backward(false)); make its last backward the last one");
    CompilingScope::on_replay([turn, left] {
      turn->unit->carry(left);
      turn->unit->find_shard_gradient();
    });
    if (settings_of(after) != settings_of(before))
      CompilingScope::on_replay([turn, after] {
        const auto compiled_in = turn->compiled_in;
        *turn = after;
        turn->compiled_in = compiled_in;
      });
  });
  turn->compiled_in = CompilingScope::serial();
}

void carry_in_compiled_step(std::shared_ptr<void> owner, at::Tensor& kept) {
  CompilingScope::add_guard([owner, at = &kept] {
    Mixed mixed;
    mixed.add(*at);
    return mixed.value();
  });
  CompilingScope::on_trace_end([owner = std::move(owner), at = &kept, before = kept](bool finished) {
    const auto left = std::exchange(*at, before);
    if (finished) CompilingScope::on_replay([owner, at, left] { *at = left; });
  });
}

}  // namespace tessera::data_parallel::fsdp
