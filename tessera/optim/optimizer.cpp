#include "tessera/optim/optimizer.h"

#include "tessera/base/error.h"
#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/tracing/detail/restart_trace.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <unordered_set>

namespace tessera::optim {

std::string Optimizer::name_of(size_t group, size_t index, const at::Tensor& parameter) const {
  return c10::str(kind(), ": parameter ", index, " of group ", group,
                  parameter.defined() ? c10::str(", ", parameter.scalar_type(), parameter.sizes(), ",") : "");
}

Optimizer::Optimizer(std::unique_ptr<torch::optim::OptimizerOptions> defaults)
    : torch::optim::Optimizer(std::vector<torch::optim::OptimizerParamGroup>{}, std::move(defaults)) {}

void Optimizer::check_parameters(size_t g, const Tensors& params) const {
  TESSERA_CHECK(!params.empty(), UsageError, kind(), ": group ", g, " has no parameters");
  std::unordered_set<const void*> seen;
  for (size_t i = 0; i < params.size(); i++) {
    const auto& p = params[i];
    TESSERA_CHECK(p.defined(), UsageError, name_of(g, i, p), " is undefined");
    TESSERA_CHECK(
        p.is_leaf(), UsageError, name_of(g, i, p),
        " is not a leaf: it is the result of an op and gets no gradient; pass the leaf tensors it was computed from");
    TESSERA_CHECK(at::isFloatingType(p.scalar_type()), UsageError, name_of(g, i, p),
                  " does not have a floating-point dtype");
    TESSERA_CHECK(seen.insert(p.unsafeGetTensorImpl()).second, UsageError, name_of(g, i, p),
                  " is in this group twice; pass each parameter once");
    const auto found = find_parameter(p, g);
    TESSERA_CHECK(!found, UsageError, name_of(g, i, p), " is already parameter ", found->index, " of group ",
                  found->group, "; pass each parameter once");
  }
}

void Optimizer::add_group(const Tensors& params, std::unique_ptr<torch::optim::OptimizerOptions> options) {
  check_parameters(param_groups_.size(), params);
  param_groups_.emplace_back(params, std::move(options));
}

// Through LibTorch's interface a caller can add groups, replace parameters, write options and erase state. Checks new
// groups, and gives the optimizer a new generation if anything has changed since the last call.
void Optimizer::sync() const {
  uint64_t hash = 0;
  const auto mix = [&](uint64_t value) { hash = (hash ^ value) * 0x9E3779B97F4A7C15u; };
  for (size_t g = 0; g < param_groups_.size(); g++) {
    mix(option_writes(g));
    mix(param_groups_[g].params().size());
    for (const auto& p : param_groups_[g].params()) mix(reinterpret_cast<uintptr_t>(p.unsafeGetTensorImpl()));
  }
  const bool erased = state_.size() < seen_states_;
  seen_states_ = state_.size();
  if (hash == seen_groups_ && !erased) return;
  for (size_t g = 0; g < param_groups_.size(); g++) check_parameters(g, param_groups_[g].params());
  seen_groups_ = hash;
  generation_ = next_generation();
}

uint64_t Optimizer::generation() const {
  sync();
  return generation_;
}

void Optimizer::zero_grad(bool set_to_none) {
  for (auto& group : param_groups_)
    for (auto& parameter : group.params()) {
      auto& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (set_to_none)
        gradient.reset();
      else
        gradient.detach_().zero_();
    }
}

Tensors Optimizer::parameters() const {
  Tensors all;
  for (const auto& group : param_groups_) all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

double Optimizer::initial_lr(size_t group) {
  if (initial_lr_.size() < group_count()) initial_lr_.resize(group_count());
  auto& initial = initial_lr_.at(group);
  if (!initial) initial = lr(group);
  return *initial;
}

at::Device Optimizer::step_device(size_t, const at::Tensor&) const { return at::kCPU; }

at::Tensor Optimizer::state_like(const at::Tensor& parameter, bool zeroed) {
  const auto& local = detail::local_or_self(parameter);
  auto state = zeroed ? at::zeros_like(local) : at::empty_like(local);
  return is_dtensor(parameter) ? tessera::detail::wrap(state, tessera::detail::meta_of(parameter).spec) : state;
}

// ---- a step

void Optimizer::check_gradient(ParamIndex at, ParamState& param, const std::vector<StateEntry>& entries) const {
  const auto &p = param_groups_[at.group].params()[at.index], &gradient = p.grad();
  const auto *spec = tessera::detail::spec_or_null(p), *gradient_spec = tessera::detail::spec_or_null(gradient);
  if (spec && spec == gradient_spec && spec == param.checked_spec.get()) return;  // checked in an earlier step
  const auto name = [&] { return name_of(at.group, at.index, p); };
  TESSERA_CHECK(gradient.layout() == at::kStrided, UsageError, name(), " has a gradient of layout ", gradient.layout(),
                "; only dense gradients are supported: call to_dense() on it");
  TESSERA_CHECK(gradient.sizes() == p.sizes() && gradient.scalar_type() == p.scalar_type(), UsageError, name(),
                " has a gradient ", gradient.scalar_type(), gradient.sizes());
  TESSERA_CHECK(is_dtensor(p) == is_dtensor(gradient), UsageError, name(), " is ",
                is_dtensor(p) ? "distributed, but its gradient is plain" : "plain, but its gradient is distributed",
                "; both must be distributed, or both plain");
  TESSERA_CHECK(!is_fused(at.group) || detail::local_or_self(p).is_non_overlapping_and_dense(), UsageError, name(),
                " is not dense in memory (strides ", detail::local_or_self(p).strides(),
                "), which fused kernels do not support: make it contiguous, or set fused = false");
  if (spec) {
    TESSERA_CHECK(!spec->has_partial(), ShardingError, name(), " has placements ", to_string(spec->placements),
                  "; a Partial parameter cannot be updated: redistribute it first");
    TESSERA_CHECK(spec == gradient_spec || spec->mesh == gradient_spec->mesh, UsageError, name(), " is on mesh(",
                  spec->mesh, ") and its gradient on mesh(", gradient_spec->mesh, ")");
  }
  for (size_t s = 0; s < param.state.size(); s++)
    TESSERA_CHECK(!entries[s].like_parameter || !param.state[s].defined() || detail::same_placement(param.state[s], p),
                  UsageError, name(), " was redistributed after its first step, but its state ", entries[s].name,
                  " was not; distribute before the first step, or save the state before and load it after");
  if (spec) param.checked_spec = tessera::detail::meta_of(p).spec;
}

std::vector<std::vector<Optimizer::ParamUpdate>> Optimizer::plan_updates() {
  const auto entries = state_entries();
  std::vector<std::vector<ParamUpdate>> updates(param_groups_.size());
  for (size_t g = 0; g < param_groups_.size(); g++) {
    const auto& params = param_groups_[g].params();
    updates[g].reserve(params.size());
    for (size_t i = 0; i < params.size(); i++) {
      const auto& gradient = params[i].grad();
      if (!gradient.defined()) continue;
      auto& param = state_of(params[i]);
      check_gradient({g, i}, param, entries);
      const auto* local_gradient =
          detail::same_placement(gradient, params[i]) ? &detail::local_or_self(gradient) : nullptr;
      updates[g].push_back({&params[i], &param, &gradient, &detail::local_or_self(params[i]), local_gradient});
    }
  }
  return updates;
}

void Optimizer::redistribute_gradients(std::vector<std::vector<ParamUpdate>>& updates) {
  std::vector<ParamUpdate*> moving;
  for (auto& group : updates)
    for (auto& update : group)
      if (!update.local_gradient) moving.push_back(&update);
  // Starts all redistributions before the first wait, which detail::local_or_self() does.
  for (auto* update : moving) update->redistributed = detail::redistribute_like(*update->gradient, *update->parameter);
  for (auto* update : moving) {
    update->gradient = &update->redistributed;
    update->local_gradient = &detail::local_or_self(update->redistributed);
  }
}

bool Optimizer::supports_scaling(size_t group) const {
  if (is_fused(group) || !has_fused_kernel()) return is_fused(group);
  const auto& params = param_groups_.at(group).params();
  return std::all_of(params.begin(), params.end(), [](const auto& parameter) {
    const auto& local = detail::local_or_self(parameter);
    return local.is_cpu() && local.is_non_overlapping_and_dense();
  });
}

void Optimizer::scheduled_in_trace() { scheduled_in_trace_ = CompilingScope::serial(); }

// Creates state before the step is traced: one program then serves the first call and all others. Where the first step
// with such state differs from one that creates it, is_new marks it.
void Optimizer::make_state_before_tracing() {
  bool made = false;
  const auto flags = std::make_shared<std::deque<bool>>();  // they share it, see made_together()
  for (size_t g = 0; g < param_groups_.size(); g++)
    for (const auto& parameter : param_groups_[g].params()) {
      if (!parameter.grad().defined()) continue;
      auto& param = state_of(parameter);
      if (param.state.size() >= state_size(g)) continue;
      const OpModesOff off;
      if (param.state.empty() && !new_state_is_neutral(g))
        param.is_new = std::shared_ptr<bool>(flags, &flags->emplace_back(true));
      add_missing_state(g, parameter, param.state);
      param.local_state = detail::local_tensors_of(param.state);
      made = true;
    }
  if (!made) return;
  changed();
  throw RestartTrace();
}

void Optimizer::make_state(const Tensors& parameters) {
  bool made = false;
  for (const auto& parameter : parameters) {
    const auto found = find_parameter(parameter, param_groups_.size());
    if (!found || !state(parameter).empty()) continue;
    TESSERA_CHECK(new_state_is_neutral(found->group), UsageError, name_of(found->group, found->index, parameter),
                  " has no state yet, and its first step differs from later ones; run one step before");
    auto& param = state_of(parameter);
    add_missing_state(found->group, parameter, param.state);
    param.local_state = detail::local_tensors_of(param.state);
    made = true;
  }
  if (made) changed();
}

uint64_t Optimizer::next_generation() {
  // Counters of other host state do not reach such numbers, so a guard of a compiled step shows whose it is.
  static std::atomic<uint64_t> last{uint64_t{1} << 40};
  return ++last;
}

at::Tensor Optimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode grad_mode(true);
    loss = closure();
  }
  step_with(nullptr);
  return loss;
}

namespace {

bool made_together(const std::shared_ptr<bool>& a, const std::shared_ptr<bool>& b) {
  return !a.owner_before(b) && !b.owner_before(a);
}

}  // namespace

void Optimizer::step_with(const Scaling* scaling) {
  const at::NoGradGuard no_grad;
  sync();
  if (compiling()) {
    TESSERA_CHECK(
        scheduled_in_trace_ != CompilingScope::serial(), UsageError, kind(),
        ": the compiled step calls step() of a learning-rate scheduler, and then step() of the optimizer; step "
        "the scheduler after the optimizer, as in PyTorch, or outside of the compiled step");
    CompilingScope::before_optimizer_step();
    make_state_before_tracing();
    CompilingScope::add_guard([this] { return static_cast<int64_t>(generation()); });
  }
  for (size_t g = 0; scaling && g < param_groups_.size(); g++)
    TESSERA_CHECK(supports_scaling(g), UsageError, kind(), ": group ", g,
                  " is not fused and needs unscaled gradients; call GradScaler::unscale_ first, or set fused = true");
  auto updates = plan_updates();
  redistribute_gradients(updates);
  for (size_t g = 0; g < updates.size(); g++) {
    const size_t size = state_size(g);
    std::vector<const ParamUpdate*> parts[2];  // 1: parameters whose first step this is
    for (auto& part : parts) part.reserve(updates[g].size());
    // In a trace: parameters with flags, those whose state was made for one trace together. So the traces of a step
    // before and after its first run are equal.
    std::vector<std::vector<const ParamUpdate*>> with_flags;
    for (auto& update : updates[g]) {
      auto& param = *update.param_state;
      update.first_step = param.state.empty() || (param.is_new && *param.is_new);
      if (param.state.size() < size) {
        add_missing_state(g, *update.parameter, param.state);
        param.local_state = detail::local_tensors_of(param.state);
        changed();
      }
      if (!param.is_new || !compiling()) {
        parts[update.first_step].push_back(&update);
        continue;
      }
      const auto part = std::find_if(with_flags.begin(), with_flags.end(), [&](const auto& each) {
        return each[0]->first_step == update.first_step && made_together(each[0]->param_state->is_new, param.is_new);
      });
      if (part == with_flags.end())
        with_flags.push_back({&update});
      else
        part->push_back(&update);
    }
    for (const auto& part : parts)
      if (!part.empty()) run_updates(g, part, scaling);
    for (const auto& part : with_flags) run_updates(g, part, scaling);
  }
}

// For parameters with state that was made for a trace. Their first step is the first run of the program, or an eager
// step before it. The program holds while all of them are new, or none is.
std::function<bool()> Optimizer::first_run_of(const std::vector<const ParamUpdate*>& updates) {
  std::vector<std::shared_ptr<bool>> flags;
  for (const auto* update : updates) flags.push_back(update->param_state->is_new);
  CompilingScope::add_guard([flags] {
    return int64_t{std::all_of(flags.begin(), flags.end(), [&](const auto& flag) { return *flag == *flags[0]; })};
  });
  CompilingScope::on_replay([flags] {
    for (const auto& flag : flags) *flag = false;
  });
  return [flag = flags[0]] { return *flag; };
}

void Optimizer::run_updates(size_t group, const std::vector<const ParamUpdate*>& updates, const Scaling* scaling) {
  const bool fused = is_fused(group) || scaling;
  const size_t size = state_size(group);
  const auto local = [&](size_t i) -> const at::Tensor& { return *updates[i]->local_parameter; };
  for (const auto& indices : detail::by_device_and_dtype(updates.size(), local)) {
    TensorLists lists;
    lists.first_step = updates[indices[0]]->first_step;
    if (updates[indices[0]]->param_state->is_new && compiling()) lists.is_first_run = first_run_of(updates);
    lists.parameters.reserve(indices.size());
    lists.gradients.reserve(indices.size());
    lists.state.resize(size);
    for (auto& list : lists.state) list.reserve(indices.size());
    for (const size_t i : indices) {
      const auto& each = *updates[i];
      lists.parameters.push_back(*each.local_parameter);
      // Fused kernels on the CPU read all tensors in memory order, so the strides must be equal.
      if (fused && each.local_gradient->strides() != each.local_parameter->strides())
        lists.gradients.push_back(at::empty_like(*each.local_parameter).copy_(*each.local_gradient));
      else
        lists.gradients.push_back(*each.local_gradient);
      for (size_t s = 0; s < size; s++) lists.state[s].push_back(each.param_state->local_state[s]);
    }
    update(group, lists, scaling);
  }
  for (const auto* update : updates) {
    if (update->param_state->is_new && !compiling()) *update->param_state->is_new = false;
    detail::mark_written(*update->parameter, fused);
    if (scaling) detail::mark_written(*update->gradient, fused);
    if (fused)
      for (const auto& written : update->param_state->local_state)
        if (written.defined()) detail::mark_written(written, fused);
  }
}

Optimizer::TensorLists Optimizer::TensorLists::only(size_t i) const {
  TensorLists one{{parameters[i]}, {gradients[i]}, {}, first_step, is_first_run};
  for (const auto& list : state) one.state.push_back({list[i]});
  return one;
}

// ---- saving and loading

std::vector<Tensors> Optimizer::groups() const {
  std::vector<Tensors> all;
  for (const auto& group : param_groups_) all.push_back(group.params());
  return all;
}

std::optional<Optimizer::ParamIndex> Optimizer::find_parameter(const at::Tensor& parameter, size_t groups) const {
  for (size_t g = 0; g < groups; g++) {
    const auto& params = param_groups_[g].params();
    for (size_t i = 0; i < params.size(); i++)
      if (params[i].is_same(parameter)) return ParamIndex{g, i};
  }
  return std::nullopt;
}

Optimizer::ParamIndex Optimizer::index_of(const at::Tensor& parameter) const {
  const auto found = find_parameter(parameter, param_groups_.size());
  TESSERA_CHECK(found, UsageError, kind(), ": a tensor of sizes ", parameter.sizes(), " is not one of its parameters");
  return *found;
}

Optimizer::ParamState* Optimizer::find_state(const at::Tensor& parameter) const {
  const auto found = state_.find(parameter.unsafeGetTensorImpl());
  return found == state_.end() ? nullptr : static_cast<ParamState*>(found->second.get());
}

Optimizer::ParamState& Optimizer::state_of(const at::Tensor& parameter) {
  auto& state = state_[parameter.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<ParamState>();
  return static_cast<ParamState&>(*state);
}

StateDict Optimizer::state(const at::Tensor& parameter) const {
  index_of(parameter);
  const auto* param = find_state(parameter);
  const auto entries = state_entries();
  StateDict dict;
  for (size_t s = 0; param && s < param->state.size(); s++)
    if (param->state[s].defined()) dict.insert(entries[s].name, param->state[s].detach());
  return dict;
}

void Optimizer::set_state(const at::Tensor& parameter, StateDict dict) {
  const at::NoGradGuard no_grad;
  changed();
  const auto at = index_of(parameter);
  Tensors kept;
  for (const auto& entry : state_entries()) {
    const at::Tensor* found = dict.find(entry.name);
    if (!found && entry.required) break;  // optional entries are last
    if (!found) {
      kept.emplace_back();
      continue;
    }
    if (!entry.like_parameter) {  // other optimizers may store `step` as an integer
      kept.push_back(found->to(step_device(at.group, parameter), at::kFloat).view(c10::IntArrayRef()));
      continue;
    }
    const auto &local = detail::local_or_self(*found), &like = detail::local_or_self(parameter);
    if (detail::same_placement(*found, parameter) && local.strides() == like.strides()) {
      kept.push_back(*found);
      continue;
    }
    auto copy = state_like(parameter, false).to(found->scalar_type());
    copy.copy_(*found);
    kept.push_back(copy);
  }
  while (!kept.empty() && !kept.back().defined()) kept.pop_back();
  auto& param = state_of(parameter);
  param.state = std::move(kept);
  param.local_state = detail::local_tensors_of(param.state);
  param.checked_spec.reset();
  param.is_new.reset();
}

// ---- torch::save

namespace {

std::string archive_key(const char* what, size_t group, size_t index, const std::string& name) {
  return c10::str(what, ".", group, ".", index, ".", name);
}

}  // namespace

void Optimizer::save(torch::serialize::OutputArchive& archive) const {
  for (const auto& p : parameters())
    TESSERA_CHECK(!is_dtensor(p), UsageError, "torch::save: this ", kind(), " has a parameter of sizes ", p.sizes(),
                  " that is distributed (", DTensor(p).spec().describe(),
                  "). A file of one rank would have its local shards only: save the training with "
                  "ts::TrainingState(...).save(dir), or the state alone with ts::dcp::save(dir, "
                  "ts::optimizer_state_dict(optimizer, *model))");
  archive.write("kind", c10::IValue(kind()));
  const auto groups = this->groups();
  for (size_t g = 0; g < groups.size(); g++) {
    for (const auto& [name, value] : options(g)) archive.write(archive_key("options", g, 0, name), value);
    for (size_t i = 0; i < groups[g].size(); i++)
      for (const auto& [name, value] : state(groups[g][i])) archive.write(archive_key("state", g, i, name), value);
  }
}

void Optimizer::load(torch::serialize::InputArchive& archive) {
  c10::IValue saved;
  TESSERA_CHECK(archive.try_read("kind", saved) && saved.isString() && saved.toStringRef() == kind(), UsageError,
                "torch::load: the file has no state of ", kind(),
                saved.isString() ? " but of " + saved.toStringRef() : "",
                "; load it into the optimizer class that saved it");
  const auto groups = this->groups();
  std::vector<StateDict> new_options(groups.size());
  std::vector<std::pair<at::Tensor, StateDict>> new_state;
  const auto read = [&](const std::string& key) {
    at::Tensor value;  // a new one for each key: LibTorch reads into a tensor that is defined
    return archive.try_read(key, value) ? std::optional(value) : std::nullopt;
  };
  for (size_t g = 0; g < groups.size(); g++) {
    for (const auto& [name, unused] : options(g)) {
      const auto value = read(archive_key("options", g, 0, name));
      TESSERA_CHECK(value, UsageError, "torch::load: the file has no ", name, " of group ", g, "; this ", kind(),
                    " has ", groups.size(), " groups");
      new_options[g].insert(name, *value);
    }
    check_options(g, new_options[g]);
    for (size_t i = 0; i < groups[g].size(); i++) {
      new_state.push_back({groups[g][i], {}});
      for (const auto& entry : state_entries()) {
        const auto value = read(archive_key("state", g, i, entry.name));
        if (!value) continue;
        TESSERA_CHECK(!entry.like_parameter || value->sizes() == groups[g][i].sizes(), UsageError,
                      "torch::load: ", entry.name, " of ", name_of(g, i, groups[g][i]), " has sizes ", value->sizes());
        new_state.back().second.insert(entry.name, value->to(groups[g][i].device()));
      }
    }
  }
  for (const auto& [parameter, dict] : new_state) set_state(parameter, dict);
  for (size_t g = 0; g < groups.size(); g++) set_options(g, new_options[g]);
}

// ---- options

namespace detail {

void check_at_least_zero(const char* kind, const char* name, double value) {
  TESSERA_CHECK(value >= 0, UsageError, kind, ": ", name, " must be at least 0; found ", value);
}

void check_implementation(const char* kind, std::optional<bool> foreach, bool fused) {
  TESSERA_CHECK(!(fused && foreach.value_or(false)), UsageError, kind,
                ": foreach and fused are both set; set only one of them");
}

}  // namespace detail
}  // namespace tessera::optim
