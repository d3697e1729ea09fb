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

const DeferredMeta* recipe_of(const at::Tensor& t) {
  return detail::deferred::deferred_meta(is_dtensor(t) ? detail::local_of(t) : t);
}

struct Target {
  std::string name;  // layers.0.attn.wq.weight
  at::Tensor tensor;
  const DeferredMeta* recipe = nullptr;
  at::Tensor filled;
};

// Parameters and buffers, shared ones once.
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
  TESSERA_CHECK(target.recipe || !t.is_meta(), UsageError, "materialize(", module, "): '", target.name,
                "' is on the meta device but was not made in deferred_init, so nobody knows its values; build the "
                "module inside deferred_init, without device(torch::kMeta)");
  if (!target.recipe) return;
  TESSERA_CHECK(t.is_leaf(), UsageError, "materialize(", module, "): '", target.name,
                "' has a grad_fn; register what parameters are computed from, or compute it under a NoGradGuard");
  const auto& value = target.recipe->tape->value(target.recipe->value);
  TESSERA_CHECK(
      t.sizes() == c10::IntArrayRef(value.sizes), UsageError, "materialize(", module, "): '", target.name,
      "' has sizes ", t.sizes(), " but was made with ", c10::IntArrayRef(value.sizes),
      ": a recipe is for a whole tensor. Make it plain inside deferred_init, distribute it after, and register the "
      "DTensor, not its local");
}

std::vector<Target> targets_of(const torch::nn::Module& module) {
  const auto name = class_name(module);
  TESSERA_CHECK(!detail::deferred::recording(), UsageError, "materialize(", name,
                ") inside deferred_init: call it after, when the tensors are distributed");
  auto all = tensors_of(module);
  for (auto& target : all) {
    target.recipe = recipe_of(target.tensor);
    check(target, name);
  }
  const bool has_work = std::any_of(all.begin(), all.end(), [](const auto& t) { return t.recipe; });
  TESSERA_CHECK(has_work || all.empty(), UsageError, "materialize(", name, "): '", all[0].name,
                "' has its values, and so has all else: it was materialised before, or not built inside deferred_init");
  return all;
}

// The name of the first of these that a step is for.
std::string needs(const Tape& tape, const std::vector<Target*>& targets, Id step) {
  for (const auto* target : targets) {
    const auto recipe = tape.recipe({target->recipe->value});
    if (std::binary_search(recipe.begin(), recipe.end(), step)) return target->name;
  }
  return "";
}

// All plain ones of a tape together, so that those which share memory will again.
void fill_plain(std::vector<Target>& targets, std::optional<c10::Device> device) {
  std::map<std::shared_ptr<Tape>, std::vector<Target*>> by_tape;
  for (auto& target : targets)
    if (target.recipe && !is_dtensor(target.tensor)) by_tape[target.recipe->tape].push_back(&target);
  for (auto& [tape, members] : by_tape) {
    std::vector<Id> values;
    for (const auto* target : members) values.push_back(target->recipe->value);
    Id step = 0;
    std::vector<at::Tensor> filled;
    try {
      filled = detail::deferred::replay(*tape, values, device, &step);
    } catch (c10::Error& error) {
      error.add_context("while filling '" + needs(*tape, members, step) + "'");
      throw;
    }
    for (size_t i = 0; i < members.size(); i++) members[i]->filled = filled[i];
  }
}

at::Tensor filled_like(const at::Tensor& t, const DeferredMeta& recipe, std::optional<c10::Device> asked) {
  const auto& spec = detail::meta_of(t).spec;
  const auto device = asked.value_or(c10::Device(spec->mesh.device_type()));
  if (auto piece = detail::deferred::replay_shard(*recipe.tape, recipe.value, *spec, device)) {
    auto real = intern(spec->mesh, spec->placements, spec->sizes, spec->strides, spec->dtype, piece->device());
    return detail::wrap(std::move(*piece), std::move(real));
  }
  const auto whole = detail::deferred::replay(*recipe.tape, {recipe.value}, device)[0];
  return distribute_tensor(whole, spec->mesh, spec->placements, {.src_data_rank = std::nullopt});
}

void fill_distributed(std::vector<Target>& targets, std::optional<c10::Device> device) {
  std::map<std::tuple<const Tape*, Id, const TensorSpec*>, at::Tensor> done;  // for those that share a value
  for (auto& target : targets) {
    if (!target.recipe || !is_dtensor(target.tensor)) continue;
    const auto& recipe = *target.recipe;
    auto& filled = done[{recipe.tape.get(), recipe.value, detail::meta_of(target.tensor).spec.get()}];
    try {
      if (!filled.defined()) filled = filled_like(target.tensor, recipe, device);
    } catch (c10::Error& error) {
      error.add_context("while filling '" + target.name + "'");
      throw;
    }
    target.filled = filled;
  }
}

// What was real all along, torch::tensor({...}) say, comes along to a device that was asked for.
void move_real(std::vector<Target>& targets, std::optional<c10::Device> device) {
  for (auto& target : targets)
    if (device && !target.recipe && !is_dtensor(target.tensor)) target.filled = target.tensor.detach().to(*device);
}

}  // namespace

bool is_deferred(const at::Tensor& t) { return t.defined() && recipe_of(t); }

void materialize(torch::nn::Module& module, std::optional<c10::Device> device) {
  auto targets = targets_of(module);
  fill_plain(targets, device);
  fill_distributed(targets, device);
  move_real(targets, device);
  for (auto& target : targets)
    if (target.filled.defined()) target.tensor.set_data(target.filled);
}

}  // namespace tessera
