#include "tessera/compile/detail/api/step_program.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/api/build_executable.h"
#include "tessera/compile/detail/api/partition_step.h"
#include "tessera/compile/detail/trace/local_tensors.h"
#include "tessera/tracing/detail/restart_trace.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <unordered_set>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

}  // namespace

bool StepProgram::GradientGuard::holds() const {
  const auto& now = parameter.grad();
  if (!now.defined() || !gradient) return now.defined() == gradient.has_value();
  const auto& local = local_or_self(now);
  return local.sizes() == at::IntArrayRef(gradient->sizes) && local.strides() == at::IntArrayRef(gradient->strides) &&
         local.scalar_type() == gradient->dtype;
}

// Gradients that are undefined get placeholders first. If the step never reads an old gradient, because it calls
// zero_grad itself, one program serves calls with and without gradients. Otherwise it is traced again without
// placeholders. A captured leaf is found while tracing and is an input from the next trace on.
StepProgram::StepProgram(const CallArguments& arguments, const std::function<Tensors()>& step, const Settings& settings,
                         bool adds_to_gradients)
    : key_(cache_key_of(arguments)) {
  const auto scope = adds_to_gradients ? CompilingScope::Region::Part : CompilingScope::Region::Step;
  bool gradient_placeholders = !adds_to_gradients;
  constexpr int kMaxTraces = 8;  // the second trace finds all captured leaves, unless the step creates new ones
  for (int traces = 0; traces < kMaxTraces;) {
    const auto outcome = trace(arguments, step, settings, scope, gradient_placeholders);
    if (outcome == TraceOutcome::Done) return;
    if (outcome == TraceOutcome::ReadsOldGradients) gradient_placeholders = false;
    if (outcome == TraceOutcome::Restarted) traces_ = {};
    if (outcome != TraceOutcome::Restarted && outcome != TraceOutcome::Unconfirmed) traces++;
  }
  TESSERA_FAIL(UsageError, "compile: every run of the step uses a new leaf tensor that requires gradients, of shape ",
               captured_.back().sizes(),
               ", and keeps it alive; create it outside of the step, or release it before the step returns");
}

StepProgram::TraceOutcome StepProgram::trace(const CallArguments& given, const std::function<Tensors()>& step,
                                             const Settings& settings, CompilingScope::Region scope,
                                             bool gradient_placeholders) {
  auto arguments = given;
  arguments.leaves.insert(arguments.leaves.end(), captured_.begin(), captured_.end());
  TraceRun run(lift(arguments), gradient_placeholders, traces_.generators());

  if (!record(run, arguments, step, settings, scope)) return TraceOutcome::Restarted;
  stream_ = run.random().advance();
  guards_ = CompilingScope::take_guards();
  on_replay_ = CompilingScope::take_effects();
  const bool is_step = scope == CompilingScope::Region::Step;
  if (is_step) traces_.check_captured(run.tracer());
  if (collect_captured_leaves(run, settings)) return TraceOutcome::FoundLeaves;

  const auto was_read = [&](const TraceRun::SavedGradient& each) {
    return each.during_trace().defined() && run.tracer().was_used(local_or_self(each.during_trace()));
  };
  const bool undefined = run.any_gradient_undefined();
  const bool reads_old_gradients =
      (undefined && !gradient_placeholders) || std::any_of(run.gradients().begin(), run.gradients().end(), was_read);
  if (reads_old_gradients && undefined && gradient_placeholders) return TraceOutcome::ReadsOldGradients;

  collect_gradients(run, reads_old_gradients);
  run.restore_memory();
  auto traced = run.tracer().finish();
  if (is_step && !traces_.confirms(traced)) return TraceOutcome::Unconfirmed;
  traces_ = {};
  build(std::move(traced), run, arguments, settings);
  return TraceOutcome::Done;
}

// Runs the step under the tracer and adds its results as outputs. false: RestartTrace was thrown.
bool StepProgram::record(TraceRun& run, const CallArguments& arguments, const std::function<Tensors()>& step,
                         const Settings& settings, CompilingScope::Region scope) {
  CompilingScope::take_guards();  // of an earlier trace that failed
  CompilingScope::take_effects();
  try {
    UnshardedParameters unsharded;
    CompilingScope compiling(&unsharded, scope);
    const OpModeScope recording(run.tracer());
    if (settings.parallel_mode) unsharded.unshard(*settings.parallel_mode, arguments);
    const auto returned = run.call(step);
    unsharded.reshard();
    const at::NoGradGuard no_grad;
    returned_specs_.clear();
    for (const auto& t : returned) {
      returned_specs_.push_back(spec_or_null(t));
      run.tracer().add_output(t.defined() ? local_or_self(t) : at::Tensor(), Output::Kind::Return, "");
    }
    run.wait_for_gradients();
    run.check_inputs_have_no_new_history();
    compiling.finish();
    run.check_inputs_have_their_shapes();
  } catch (const RestartTrace&) {
    return false;
  }
  return true;
}

// Were there leaves that are not inputs yet? A leaf that only the tracer references was created by the step itself.
bool StepProgram::collect_captured_leaves(TraceRun& run, const Settings& settings) {
  std::unordered_set<const void*> inputs;
  for (const auto& each : run.gradients()) inputs.insert(each.parameter.unsafeGetTensorImpl());
  const auto before = captured_.size();
  for (const auto& leaf : run.tracer().leaves()) {
    if (inputs.count(leaf.tensor.unsafeGetTensorImpl()) || leaf.tensor.use_count() == 1) continue;
    captured_.push_back(leaf.tensor);
    leaf.tensor.mutable_grad() = leaf.gradient;
  }
  if (captured_.size() == before) return false;
  TESSERA_CHECK(!settings.parallel_mode, UsageError, "compile: the step uses a parameter of shape ",
                captured_.back().sizes(),
                " that is not part of its arguments (a lambda that captures its model?); with DataParallel pass the "
                "model as an argument, otherwise its parameters would not be distributed");
  return true;
}

// What the step did to each gradient: computed it, replaced it by other memory, or left it undefined.
void StepProgram::collect_gradients(TraceRun& run, bool reads_old_gradients) {
  gradients_.clear();
  external_gradients_.clear();
  without_gradient_.clear();
  gradient_guards_.clear();
  for (const auto& each : run.gradients()) {
    if (reads_old_gradients)
      gradient_guards_.push_back({each.parameter, each.gradient.defined()
                                                      ? std::optional(Type::of(local_or_self(each.gradient)))
                                                      : std::nullopt});
    const auto& now = each.parameter.grad();
    if (now.defined() && run.tracer().was_allocated(local_or_self(now))) {
      run.tracer().add_output(local_or_self(now), Output::Kind::Gradient, each.name);
      gradients_.push_back({each.parameter, now});
    } else if (now.defined() && !now.is_same(each.during_trace())) {
      external_gradients_.push_back({each.parameter, now});
    } else if (!now.defined()) {
      without_gradient_.push_back(each.parameter);
    }
  }
}

void StepProgram::build(Tracer::Result traced, const TraceRun& run, const CallArguments& arguments,
                        const Settings& settings) {
  TESSERA_CHECK(!traced.program.nodes.empty() || !traced.program.outputs.empty(), UsageError,
                "compile: the step runs no tensor op and returns no tensor; there is nothing to compile");
  std::vector<InputBindings::OldGradient> old_gradients;
  for (const auto& each : run.gradients())
    if (each.gradient.defined()) old_gradients.push_back({each.parameter, each.gradient});
  const auto bind = [&](const Program& program) {
    traced.storages.resize(static_cast<size_t>(program.buffers));  // passes may have added buffers
    traced.owners.resize(static_cast<size_t>(program.buffers));
    bindings_ = InputBindings(program, traced, arguments, old_gradients);
    return shared_storages(program, std::move(traced.storages));
  };
  executable_ = build_executable(std::move(traced.program), arguments.program_name, settings, report_, bind);
  refresh_gradients();
}

// Updates the gradient tensors whose memory has moved: a pass may have placed one in a bucket, for example.
void StepProgram::refresh_gradients() {
  size_t next = 0;
  for (const auto& output : executable_->program().outputs) {
    if (output.kind != Output::Kind::Gradient) continue;
    auto& each = gradients_[next++];
    auto now = executable_->output(output);
    if (now.is_alias_of(local_or_self(each.gradient))) continue;
    each.storage_uses = 0;
    each.gradient = wrap_with_spec(std::move(now), spec_or_null(each.gradient));
  }
}

// A gradient of an earlier run that the user still references, or a view of it, must keep its values: the program
// writes into new memory instead.
void StepProgram::detach_shared_gradients() {
  const auto is_shared = [](const SetGradient& each) {
    const auto& local = local_or_self(each.gradient);
    const bool distributed = !local.is_same(each.gradient);
    return each.storage_uses > 0 && (each.gradient.use_count() > 2 || (distributed && local.use_count() > 1) ||
                                     local.storage().use_count() > each.storage_uses);
  };
  if (std::none_of(gradients_.begin(), gradients_.end(), is_shared)) return;
  size_t next = 0;
  const auto& program = executable_->program();
  for (const auto& output : program.outputs)
    if (output.kind == Output::Kind::Gradient && is_shared(gradients_[next++]))
      executable_->give_new_memory(program.buffer_of(output.value));
  refresh_gradients();
}

bool StepProgram::fits(const CallArguments& arguments, const CacheKey& key) const {
  const auto holds = [](const auto& guard) { return guard.holds(); };
  return key == key_ && std::all_of(guards_.begin(), guards_.end(), holds) &&
         std::all_of(gradient_guards_.begin(), gradient_guards_.end(), holds) && bindings_.fits(arguments);
}

Tensors StepProgram::run(const CallArguments& arguments) {
  bindings_.bind(*executable_, arguments);
  detach_shared_gradients();
  executable_->run();
  stream_.apply();
  for (auto& each : gradients_) {
    if (!each.parameter.grad().is_same(each.gradient)) each.parameter.mutable_grad() = each.gradient;
    if (each.storage_uses == 0) each.storage_uses = local_or_self(each.gradient).storage().use_count();
  }
  for (const auto& each : external_gradients_) each.parameter.mutable_grad() = each.gradient;
  for (const auto& parameter : without_gradient_) parameter.mutable_grad().reset();
  for (const auto& repeat : on_replay_) repeat();
  Tensors returned;
  for (const auto& output : executable_->program().outputs)
    if (output.kind == Output::Kind::Return)
      returned.push_back(wrap_with_spec(executable_->output(output), returned_specs_[returned.size()]));
  return returned;
}

Tensors StepCache::call(CallArguments arguments, const std::function<Tensors()>& step) {
  if (settings_.backend == "eager" || compiling()) return step();  // part of the program of the outer step
  // A leaf is guarded by identity: the program keeps the memory of its gradient.
  for (const auto& t : arguments.tensors)
    if (t.defined() && t.is_leaf() && t.requires_grad()) arguments.leaves.push_back(t);
  if (settings_.parallel_mode) check_data_parallel_arguments(*settings_.parallel_mode, arguments);
  return programs_.call(arguments, settings_, step,
                        {.what = "step",
                         .fall_back = !settings_.fullgraph && !settings_.parallel_mode,
                         .before_compile = [&](const CacheKey& key) { before_compile(arguments, key); }});
}

void StepCache::before_compile(const CallArguments& arguments, const CacheKey& key) {
  if (size() > 0 && !std::exchange(warned_of_recompile_, true))
    TORCH_WARN("compile: the step is recompiled, because ", key.difference(last().key()),
               "; this is the only warning, and at most ", settings_.cache_size, " programs are cached");
  if (settings_.parallel_mode && partitioned_ != arguments.modules.at(0)) {
    partition_parameters(*settings_.parallel_mode, arguments);
    partitioned_ = arguments.modules[0];
  }
}

const StepProgram& StepCache::last() const {
  TESSERA_CHECK(size() > 0, UsageError, "compile: the step has not run yet; call it once");
  return *programs_.programs().front();
}

}  // namespace tessera::compiler
