#include "tessera/nn/detail/deferred/replay.h"

#include "tessera/base/error.h"
#include "tessera/nn/detail/deferred/shard_replay.h"

#include <ATen/core/grad_mode.h>

#include <unordered_map>

namespace tessera::detail::deferred {
namespace {

using c10::IValue;

class Replayer {
 public:
  // `shard`: run on the local shards of this spec; null: on full tensors.
  Replayer(const Tape& tape, std::optional<c10::Device> device, const TensorSpec* shard, Id* running_op = nullptr)
      : tape_(tape), device_(device), shard_(shard), running_op_(running_op) {}

  std::vector<at::Tensor> run(const std::vector<Id>& ops, const std::vector<Id>& targets) {
    at::NoGradGuard no_grad;
    std::unordered_map<Id, Id> last_use;
    for (const Id id : ops)
      for (const auto& [index, v] : tape_.op(id).inputs) last_use[v] = id;
    for (const Id v : targets) last_use[v] = tape_.next_op();
    for (const Id id : ops) {
      const auto& op = tape_.op(id);
      if (running_op_) *running_op_ = id;
      try {
        run(op);
      } catch (c10::Error& error) {
        error.add_context(c10::str("in op ", id, " of deferred_init, ", toString(op.op.operator_name())));
        throw;
      }
      for (const auto& [index, v] : op.inputs)
        if (last_use[v] == id) values_.erase(v);
      for (const Id v : op.outputs)
        if (!last_use.contains(v)) values_.erase(v);
    }
    std::vector<at::Tensor> out;
    for (const Id v : targets) out.push_back(values_.at(v));
    return out;
  }

 private:
  void run(const RecordedOp& op) {
    for (const auto& [t, version] : op.constants) {
      TESSERA_CHECK(!t.is_meta(), UsageError, "the initialization reads a tensor of sizes ", t.sizes(),
                    " on the meta device that was not made in deferred_init, so it has no values");
      TESSERA_CHECK(t.is_inference() || t._version() == version, UsageError, "a real tensor of sizes ", t.sizes(),
                    " that the initialization reads was modified; do not modify it before materialize()");
    }
    auto stack = arguments(op);
    if (shard_ && !localize_arguments(op, *shard_, stack)) {  // another rank does it
      for (const Id v : op.outputs) values_.try_emplace(v);
      return;
    }
    op.op.callBoxed(stack);
    size_t next = 0;
    for (const auto& v : stack)
      each_tensor(v, [&](const at::Tensor& t) {
        const Id value = op.outputs[next++];
        if (value != kNone) values_[value] = t;
      });
  }

  std::vector<IValue> arguments(const RecordedOp& op) const {
    std::vector<IValue> out;
    size_t tensors = 0;
    auto input = op.inputs.begin();
    for (const auto& v : op.arguments)
      out.push_back(map_tensors(v, [&](const at::Tensor& t) {
        const bool is_value = input != op.inputs.end() && input->first == tensors;
        tensors++;
        return is_value ? values_.at((input++)->second) : on_device(t);
      }));
    if (!device_) return out;
    const auto& schema = op.op.schema().arguments();
    for (size_t i = 0; i < out.size(); i++)
      if (schema[i].name() == "device" && (out[i].isDevice() || tensors == 0)) out[i] = *device_;
    return out;
  }

  at::Tensor on_device(const at::Tensor& constant) const {
    const bool any_device = !device_ || !constant.defined() || constant.dim() == 0;
    return any_device ? constant : constant.to(*device_);
  }

  const Tape& tape_;
  std::optional<c10::Device> device_;
  const TensorSpec* shard_;
  Id* running_op_;
  std::unordered_map<Id, at::Tensor> values_;
};

}  // namespace

std::vector<at::Tensor> replay(const Tape& tape, const std::vector<Id>& values, std::optional<c10::Device> device,
                               Id* running_op) {
  return Replayer(tape, device, nullptr, running_op).run(tape.ops_needed_for(values), values);
}

std::optional<at::Tensor> replay_shard(const Tape& tape, Id value, const TensorSpec& spec, c10::Device device) {
  const auto ops = tape.ops_needed_for({value});
  if (!can_replay_on_shard(tape, ops, spec.sizes)) return {};
  return Replayer(tape, device, &spec).run(ops, {value})[0];
}

}  // namespace tessera::detail::deferred
