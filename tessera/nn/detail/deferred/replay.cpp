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
  Replayer(const Tape& tape, std::optional<c10::Device> device, const TensorSpec* piece, Id* under_way = nullptr)
      : tape_(tape), device_(device), piece_(piece), under_way_(under_way) {}

  std::vector<at::Tensor> run(const std::vector<Id>& steps, const std::vector<Id>& targets) {
    at::NoGradGuard no_grad;
    std::unordered_map<Id, Id> last_use;
    for (const Id s : steps)
      for (const auto& [place, v] : tape_.step(s).inputs) last_use[v] = s;
    for (const Id v : targets) last_use[v] = tape_.next_step();
    for (const Id s : steps) {
      const auto& step = tape_.step(s);
      if (under_way_) *under_way_ = s;
      try {
        run(step);
      } catch (c10::Error& error) {
        error.add_context(c10::str("in step ", s, " of deferred_init, ", toString(step.op.operator_name())));
        throw;
      }
      for (const auto& [place, v] : step.inputs)
        if (last_use[v] == s) values_.erase(v);
      for (const Id v : step.outputs)
        if (!last_use.contains(v)) values_.erase(v);
    }
    std::vector<at::Tensor> out;
    for (const Id v : targets) out.push_back(values_.at(v));
    return out;
  }

 private:
  void run(const Step& step) {
    for (const auto& [t, version] : step.constants) {
      TESSERA_CHECK(!t.is_meta(), UsageError, "the initialisation reads a tensor of sizes ", t.sizes(),
                    " on the meta device that was not made in deferred_init, so it has no values");
      TESSERA_CHECK(t.is_inference() || t._version() == version, UsageError, "a real tensor of sizes ", t.sizes(),
                    " that the initialisation reads was written to since; keep it as it is until materialize()");
    }
    auto stack = arguments(step);
    if (piece_ && !localize_arguments(step, *piece_, stack)) {  // other ranks' to do
      for (const Id v : step.outputs) values_.try_emplace(v);
      return;
    }
    step.op.callBoxed(stack);
    size_t next = 0;
    for (const auto& v : stack)
      each_tensor(v, [&](const at::Tensor& t) {
        const Id value = step.outputs[next++];
        if (value != kNone) values_[value] = t;
      });
  }

  std::vector<IValue> arguments(const Step& step) const {
    std::vector<IValue> out;
    size_t place = 0;
    auto input = step.inputs.begin();
    for (const auto& v : step.arguments)
      out.push_back(map_tensors(v, [&](const at::Tensor& t) {
        const bool is_value = input != step.inputs.end() && input->first == place;
        place++;
        return is_value ? values_.at((input++)->second) : on_device(t);
      }));
    if (!device_) return out;
    const auto& schema = step.op.schema().arguments();
    for (size_t i = 0; i < out.size(); i++)
      if (schema[i].name() == "device" && (out[i].isDevice() || place == 0)) out[i] = *device_;
    return out;
  }

  at::Tensor on_device(const at::Tensor& constant) const {
    const bool is_free = !device_ || !constant.defined() || constant.dim() == 0;
    return is_free ? constant : constant.to(*device_);
  }

  const Tape& tape_;
  std::optional<c10::Device> device_;
  const TensorSpec* piece_;
  Id* under_way_;
  std::unordered_map<Id, at::Tensor> values_;
};

}  // namespace

std::vector<at::Tensor> replay(const Tape& tape, const std::vector<Id>& values, std::optional<c10::Device> device,
                               Id* under_way) {
  return Replayer(tape, device, nullptr, under_way).run(tape.recipe(values), values);
}

std::optional<at::Tensor> replay_shard(const Tape& tape, Id value, const TensorSpec& spec, c10::Device device) {
  const auto steps = tape.recipe({value});
  if (!can_replay_on_shard(tape, steps, spec.sizes)) return {};
  return Replayer(tape, device, &spec).run(steps, {value})[0];
}

}  // namespace tessera::detail::deferred
