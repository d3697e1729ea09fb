#include "tessera/nn/deferred_init.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/detail/deferred/record.h"
#include "tessera/nn/detail/deferred/replay.h"
#include "tessera/nn/module_tree.h"

#include <algorithm>
#include <map>
#include <unordered_set>

namespace tessera {

namespace detail {

DeferredInitScope::DeferredInitScope() : recording_((deferred::enter_recording(), kDeferredKey)) {}
DeferredInitScope::~DeferredInitScope() { deferred::leave_recording(); }

}  // namespace detail

namespace {

using detail::deferred::DeferredMeta;
using detail::deferred::Id;
using detail::deferred::Tape;

const DeferredMeta* deferred_meta_of(const at::Tensor& t) {
  return detail::deferred::deferred_meta(is_dtensor(t) ? detail::local_of(t) : t);
}

struct Target {
  std::string name;  // layers.0.attn.wq.weight
  at::Tensor tensor;
  const DeferredMeta* deferred = nullptr;  // null: the tensor is real
  at::Tensor filled;
};

// Parameters and buffers; a shared tensor appears once.
std::vector<Target> tensors_of(const torch::nn::Module& module) {
  std::vector<Target> out;
  std::unordered_set<const c10::TensorImpl*> seen;
  const auto add = [&](const auto& items) {
    for (const auto& item : items)
      if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
        out.push_back({item.key(), item.value(), nullptr, {}});
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return out;
}

void check(const Target& target, const std::string& module) {
  const auto& t = target.tensor;
  TESSERA_CHECK(target.deferred || !t.is_meta(), UsageError, "materialize(", module, "): '", target.name,
                "' is on the meta device but was not made in deferred_init, so its values are unknown; build the "
                "module inside deferred_init, without device(torch::kMeta)");
  if (!target.deferred) return;
  TESSERA_CHECK(t.is_leaf(), UsageError, "materialize(", module, "): '", target.name,
                "' has a grad_fn; register the tensors that it is computed from, or compute it under a NoGradGuard");
  const auto& value = target.deferred->tape->value(target.deferred->value);
  TESSERA_CHECK(
      t.sizes() == c10::IntArrayRef(value.sizes), UsageError, "materialize(", module, "): '", target.name,
      "' has sizes ", t.sizes(), " but was made with ", c10::IntArrayRef(value.sizes),
      ". Create the full tensor inside deferred_init, distribute it afterwards, and register the DTensor, not its "
      "local tensor");
}

std::vector<Target> targets_of(const torch::nn::Module& module) {
  const auto name = class_name(module);
  TESSERA_CHECK(!detail::deferred::recording(), UsageError, "materialize(", name,
                ") inside deferred_init: call it after deferred_init");
  auto all = tensors_of(module);
  for (auto& target : all) {
    target.deferred = deferred_meta_of(target.tensor);
    check(target, name);
  }
  const bool any_deferred = std::any_of(all.begin(), all.end(), [](const auto& t) { return t.deferred; });
  TESSERA_CHECK(any_deferred || all.empty(), UsageError, "materialize(", name, "): no tensor is deferred ('",
                all[0].name, "' has values, for example): the module was materialized before, or not built inside ",
                "deferred_init");
  return all;
}

// The name of the first target that depends on an op.
std::string name_of_dependent(const Tape& tape, const std::vector<Target*>& targets, Id op) {
  for (const auto* target : targets) {
    const auto ops = tape.ops_needed_for({target->deferred->value});
    if (std::binary_search(ops.begin(), ops.end(), op)) return target->name;
  }
  return "";
}

// Fills all plain tensors of a tape together, so that tensors that shared memory share it again.
void fill_plain(std::vector<Target>& targets, std::optional<c10::Device> device) {
  std::map<std::shared_ptr<Tape>, std::vector<Target*>> by_tape;
  for (auto& target : targets)
    if (target.deferred && !is_dtensor(target.tensor)) by_tape[target.deferred->tape].push_back(&target);
  for (auto& [tape, members] : by_tape) {
    std::vector<Id> values;
    for (const auto* target : members) values.push_back(target->deferred->value);
    Id op = 0;
    std::vector<at::Tensor> filled;
    try {
      filled = detail::deferred::replay(*tape, values, device, &op);
    } catch (c10::Error& error) {
      error.add_context("while filling '" + name_of_dependent(*tape, members, op) + "'");
      throw;
    }
    for (size_t i = 0; i < members.size(); i++) members[i]->filled = filled[i];
  }
}

at::Tensor filled_like(const at::Tensor& t, const DeferredMeta& deferred, std::optional<c10::Device> requested) {
  const auto& spec = detail::meta_of(t).spec;
  const auto device = requested.value_or(c10::Device(spec->mesh.device_type()));
  if (auto shard = detail::deferred::replay_shard(*deferred.tape, deferred.value, *spec, device)) {
    auto real_spec = intern(spec->mesh, spec->placements, spec->sizes, spec->strides, spec->dtype, shard->device());
    return detail::wrap(std::move(*shard), std::move(real_spec));
  }
  const auto full = detail::deferred::replay(*deferred.tape, {deferred.value}, device)[0];
  return distribute_tensor(full, spec->mesh, spec->placements, {.src_data_rank = std::nullopt});
}

void fill_distributed(std::vector<Target>& targets, std::optional<c10::Device> device) {
  std::map<std::tuple<const Tape*, Id, const TensorSpec*>, at::Tensor> done;  // for tensors that share a value
  for (auto& target : targets) {
    if (!target.deferred || !is_dtensor(target.tensor)) continue;
    const auto& deferred = *target.deferred;
    auto& filled = done[{deferred.tape.get(), deferred.value, detail::meta_of(target.tensor).spec.get()}];
    try {
      if (!filled.defined()) filled = filled_like(target.tensor, deferred, device);
    } catch (c10::Error& error) {
      error.add_context("while filling '" + target.name + "'");
      throw;
    }
    target.filled = filled;
  }
}

// Moves real tensors, such as torch::tensor({...}), to the requested device.
void move_real(std::vector<Target>& targets, std::optional<c10::Device> device) {
  for (auto& target : targets)
    if (device && !target.deferred && !is_dtensor(target.tensor)) target.filled = target.tensor.detach().to(*device);
}

}  // namespace

bool is_deferred(const at::Tensor& t) { return t.defined() && deferred_meta_of(t); }

void materialize(torch::nn::Module& module, std::optional<c10::Device> device) {
  auto targets = targets_of(module);
  fill_plain(targets, device);
  fill_distributed(targets, device);
  move_real(targets, device);
  for (auto& target : targets)
    if (target.filled.defined()) target.tensor.set_data(target.filled);
}

}  // namespace tessera
