#include "tessera/compile/detail/api/step_program.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/api/build_executable.h"
#include "tessera/compile/detail/api/partition_step.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/compile/detail/replay/interpret.h"
#include "tessera/compile/detail/trace/local_tensors.h"
#include "tessera/numerics/detail/innermost_scope.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

// A leaf is guarded by identity: the program keeps the memory of its gradient. A frozen one can have a gradient, too.
void add_leaves(CallArguments& arguments) {
  for (const auto& t : arguments.tensors)
    if (t.defined() && t.is_leaf() && (t.requires_grad() || t.grad().defined())) arguments.leaves.push_back(t);
}

// While alive, a backward that reaches the autograd history of an argument throws: that graph belongs to the caller,
// and every call would have another one.
class HistoryGuard {
 public:
  explicit HistoryGuard(const Tensors& arguments) {
    for (size_t i = 0; i < arguments.size(); i++) {
      if (!arguments[i].defined()) continue;
      add(arguments[i], i);
      if (arguments[i].is_view()) add(at::Tensor(arguments[i]._base()), i);
    }
  }
  ~HistoryGuard() {
    for (const auto& [tensor, hook] : hooks_) tensor.remove_hook(hook);
  }
  HistoryGuard(const HistoryGuard&) = delete;

 private:
  void add(const at::Tensor& t, size_t i) {
    if (!t.requires_grad() || t.is_leaf()) return;
    hooks_.emplace_back(t, t.register_hook([i](const at::Tensor&) {
      TESSERA_FAIL(UsageError, "compile: tensor argument ", i,
                   " has an autograd history, and a backward of the step runs into it; that graph is outside of the "
                   "step. Pass t.detach(), or compile the code that computes the argument too");
    }));
  }
  std::vector<std::pair<at::Tensor, unsigned>> hooks_;
};

at::Tensor copy_of_local(const at::Tensor& t) { return t.defined() ? local_or_self(t).detach().clone() : at::Tensor(); }

}  // namespace

// Gradients that are undefined get placeholders first. If the step never reads an old gradient, because it calls
// zero_grad itself, one program serves calls with and without gradients. Otherwise it is traced again without
// placeholders.
StepProgram::StepProgram(const CallArguments& arguments, const TracedFunction& function, const Settings& settings,
                         bool adds_to_gradients) {
  gradient_placeholders_ = !adds_to_gradients;
  compile(arguments, function, settings,
          adds_to_gradients ? CompilingScope::Region::Part : CompilingScope::Region::Step, !adds_to_gradients);
}

void StepProgram::record(TraceRun& run, const CallArguments& arguments, TraceRequest& request) {
  UnshardedParameters unsharded;
  CompilingScope compiling(&unsharded, region_);
  const OpModeScope recording(run.tracer());
  const numerics::InnermostScope numerics;
  if (request.settings.parallel_mode) unsharded.unshard(*request.settings.parallel_mode, arguments);
  const auto returned = [&] {
    const HistoryGuard guard(region_ == CompilingScope::Region::Step ? arguments.tensors : Tensors());
    return call_function(run, request);
  }();
  unsharded.reshard();
  const at::NoGradGuard no_grad;
  returned_.clear();
  for (const auto& t : returned) {
    returned_.add(t);
    run.tracer().add_output(t.defined() ? local_or_self(t) : at::Tensor(), Output::Kind::Return, "");
  }
  run.wait_for_gradients();
  run.check_inputs_have_no_new_history();
  compiling.finish();
  run.check_inputs_have_their_shapes();
}

TracedProgram::TraceOutcome StepProgram::collect(TraceRun& run) {
  const auto was_read = [&](const TraceRun::SavedGradient& each) {
    return each.during_trace().defined() && run.tracer().was_used(local_or_self(each.during_trace()));
  };
  const bool undefined = run.any_gradient_undefined();
  const bool reads_old_gradients =
      (undefined && !gradient_placeholders_) || std::any_of(run.gradients().begin(), run.gradients().end(), was_read);
  if (reads_old_gradients && undefined && gradient_placeholders_) return TraceOutcome::ReadsOldGradients;
  collect_gradients(run, reads_old_gradients);
  return TraceOutcome::Done;
}

// What the step did to each gradient: computed it, replaced it by other memory, or left it undefined.
void StepProgram::collect_gradients(TraceRun& run, bool reads_old_gradients) {
  gradients_.clear();
  external_gradients_.clear();
  without_gradient_.clear();
  gradient_guards_.clear();
  for (const auto& each : run.gradients()) {
    if (reads_old_gradients) gradient_guards_.push_back({each.parameter, TensorGuard(each.gradient)});
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
  std::vector<InputBindings::OldGradient> old_gradients;
  for (const auto& each : run.gradients())
    if (each.gradient.defined()) old_gradients.push_back({each.parameter, each.gradient});
  const auto bind = [&](const Program& program) {
    traced.storages.resize(static_cast<size_t>(program.buffers));  // passes may have added buffers
    traced.owners.resize(static_cast<size_t>(program.buffers));
    bindings_ = InputBindings(program, traced, arguments, old_gradients);
    return shared_storages(program, std::move(traced.storages));
  };
  returned_.find_bases(arguments, traced);
  const auto& values = traced.program.values;
  if (std::any_of(values.begin(), values.end(), [](const Value& v) { return v.type.dtype == c10::kBFloat16; }))
    in_float32_ = traced.program;
  executable_ = build_executable(std::move(traced.program), arguments.program_name, settings, report_, bind);
  const bool rounds = std::any_of(report_.begin(), report_.end(), [](const PassReport& pass) {
    return pass.name == "widen_bfloat16" && pass.matched.times > 0;
  });
  if (rounds)
    compute_in_float32(*in_float32_);
  else
    in_float32_.reset();
  find_written_buffers(executable_->program());
  refresh_gradients();
}

std::function<void()> StepProgram::keep_collected() {
  auto collected = [this] { return std::tie(gradients_, external_gradients_, without_gradient_, gradient_guards_); };
  auto kept = std::apply([](const auto&... each) { return std::tuple(each...); }, collected());
  return [collected, kept = std::move(kept), others = TracedProgram::keep_collected()] {
    collected() = kept;
    others();
  };
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

bool StepProgram::more_guards_hold(const CallArguments& /*arguments*/, std::string* why) const {
  if (std::all_of(gradient_guards_.begin(), gradient_guards_.end(), [](const auto& guard) { return guard.holds(); }))
    return true;
  if (why) *why = "a gradient that the step adds to was undefined and is defined, or the reverse, or has another type";
  return false;
}

// Memory that the program writes, gradients and random state.
SavedState StepProgram::save_before_run(const CallArguments& arguments) const {
  auto state = TracedProgram::save_before_run(arguments);
  for (const auto* list : {&gradients_, &external_gradients_})
    for (const auto& each : *list) state.add_gradient(each.parameter);
  for (const auto& parameter : without_gradient_) state.add_gradient(parameter);
  return state;
}

void StepProgram::run_executable(const CallArguments& arguments) {
  set_numbers(arguments);
  bindings_.bind(*executable_, arguments);
  detach_shared_gradients();
  executable_->run();
}

Tensors StepProgram::returned_tensors(const CallArguments& arguments) const {
  Tensors returned;
  for (const auto& output : executable_->program().outputs)
    if (output.kind == Output::Kind::Return)
      returned.push_back(returned_.next(*executable_, output, arguments, returned, false));
  return returned;
}

Returned StepProgram::run(const CallArguments& arguments) {
  run_executable(arguments);
  stream_.apply();
  for (auto& each : gradients_)
    if (!each.parameter.grad().is_same(each.gradient)) each.parameter.mutable_grad() = each.gradient;
  for (const auto& each : external_gradients_) each.parameter.mutable_grad() = each.gradient;
  for (const auto& parameter : without_gradient_) parameter.mutable_grad().reset();
  for (const auto& repeat : on_replay_) repeat();
  for (auto& each : gradients_)  // after the effects: FSDP keeps a reference to its flat gradient
    if (each.storage_uses == 0) each.storage_uses = local_or_self(each.gradient).storage().use_count();
  if (executable_->runs() == 1) exclude_changed_members();
  return {returned_tensors(arguments), returned_numbers()};
}

// Results, gradients and memory after a run of the program, or of the step in eager mode.
TracedProgram::CheckedTensors StepProgram::checked_tensors(const CallArguments& arguments, const Tensors& returned,
                                                           bool of_program, bool /*exact*/) const {
  const at::NoGradGuard no_grad;
  const OpModesOff off;
  const auto& program = executable_->program();
  CheckedTensors all;
  std::vector<const Output*> results, gradients;
  for (const auto& output : program.outputs)
    if (output.kind != Output::Kind::Kept)
      (output.kind == Output::Kind::Return ? results : gradients).push_back(&output);
  const auto buffer = [&](const Output& output) {
    return output.value == kNone ? -1 : program.buffer_of(output.value);
  };
  for (size_t i = 0; i < results.size(); i++)
    all.push_back(
        {c10::str("result ", i), i < returned.size() ? copy_of_local(returned[i]) : at::Tensor(), buffer(*results[i])});
  for (size_t i = 0; i < gradients_.size(); i++)
    all.push_back({"the gradient of " + gradients[i]->name,
                   copy_of_local(of_program ? gradients_[i].gradient : gradients_[i].parameter.grad()),
                   buffer(*gradients[i])});
  for (const auto& each : external_gradients_)
    all.push_back({"the gradient of a parameter", copy_of_local(of_program ? each.gradient : each.parameter.grad())});
  for (const auto& parameter : without_gradient_)
    all.push_back({"the gradient of a parameter", of_program ? at::Tensor() : copy_of_local(parameter.grad())});
  for (auto& each : written_memory(arguments)) all.push_back(std::move(each));
  return all;
}

// Results and gradients as the step computes them without roundings to bfloat16, from the present state, which stays.
Tensors StepProgram::results_in_float32() const {
  if (!in_float32_) return {};
  const at::NoGradGuard no_grad;
  const OpModesOff off;
  std::map<const void*, at::Tensor> copies;  // by storage: inputs may share memory
  Tensors inputs;
  for (size_t i = 0; i < in_float32_->inputs.size(); i++) {  // passes may have added constants after them
    const auto t = executable_->output({.value = executable_->program().inputs[i].value});
    if (t.numel() > 0 && t.storage().nbytes() == 0) {  // old gradients that nothing reads have no memory
      inputs.emplace_back();
      continue;
    }
    const auto [copy, is_new] = copies.try_emplace(t.storage().unsafeGetStorageImpl());
    if (is_new) copy->second = storage_as_tensor(t).clone();
    inputs.push_back(copy->second.as_strided(t.sizes(), t.strides(), t.storage_offset()));
  }
  const auto all = interpret(*in_float32_, inputs);
  Tensors results, gradients;
  for (size_t i = 0; i < all.size(); i++) {
    const auto kind = in_float32_->outputs[i].kind;
    if (kind != Output::Kind::Kept) (kind == Output::Kind::Return ? results : gradients).push_back(all[i]);
  }
  results.insert(results.end(), gradients.begin(), gradients.end());
  return results;
}

// First the program, without its effects on host state; then the step itself, from the state before. So host state
// advances once, and the call leaves what eager mode leaves.
Returned StepProgram::run_beside_eager(const CallArguments& arguments, const TracedFunction& function, bool exact) {
  auto before = save_before_run(arguments);
  CheckedTensors compiled;
  RandomState stream_after;
  try {
    run_executable(arguments);
    stream_.apply();
    stream_after = random::state();
    compiled = checked_tensors(arguments, returned_tensors(arguments), true, exact);
  } catch (...) {
    before.restore();
    throw;
  }
  const auto numbers = returned_numbers();
  before.restore();
  const auto in_float32 = results_in_float32();
  if (in_float32_) before.restore();  // random state
  auto eager = function(nullptr);
  constexpr const char* kState = "The state is that of the step in eager mode, complete.";
  compare_with_eager(compiled, checked_tensors(arguments, eager.tensors, false, exact), exact, kState, in_float32);
  const bool same_stream = random::state().seed == stream_after.seed && random::state().offset == stream_after.offset;
  const bool same_numbers = ResultLeaves{numbers, ""}.text() == ResultLeaves{eager.leaves.numbers, ""}.text();
  TESSERA_CHECK(same_stream && same_numbers, UsageError,
                "compile: a compiled program differs from eager mode, from the same state: ",
                same_stream ? "a number of the result differs" : "it draws another count of random numbers", ". ",
                kState);
  const at::NoGradGuard no_grad;
  for (auto& t : eager.tensors)
    if (t.defined() && t.requires_grad()) t = t.detach();
  return {std::move(eager.tensors), std::move(eager.leaves.numbers)};
}

StepCache::StepCache(Settings settings) : settings_(std::move(settings)) {
  if (settings_.load.empty()) return;
  TESSERA_CHECK(!settings_.run_with && !settings_.parallel_mode, UsageError,
                "load: a saved step has neither a runner of its own nor DataParallel");
  loaded_ = SavedStep::read(settings_.load);
  const auto now = describe_settings(settings_);
  TESSERA_CHECK(now == loaded_->settings, UsageError, "load: ", settings_.load, " was compiled with ",
                loaded_->settings, ", and this step is compiled with ", now);
}

// Null if no file was given, or if its program does not fit the call; then `why` gets the reason.
std::shared_ptr<StepProgram> StepCache::find_loaded(const CallArguments& arguments, std::string& why) const {
  if (!loaded_) return nullptr;
  auto program = StepProgram::load(*loaded_, arguments, settings_, why);
  if (!program) why = c10::str("the program of ", settings_.load, " is not for this call: ", why);
  return program;
}

void StepCache::save(const std::string& path, CallArguments arguments) const {
  add_leaves(arguments);
  const auto now = ThreadState::now();
  for (const auto& program : programs_.programs())
    if (program->fits(arguments, now)) return program->save(arguments, settings_).write(path);
  TESSERA_FAIL(UsageError, "save: no program is cached for these arguments; call the step with them once");
}

bool StepCache::has_program_for(CallArguments arguments) const {
  const NumericsScope numerics(settings_.numerics);
  add_leaves(arguments);
  const auto now = ThreadState::now();
  const auto& programs = programs_.programs();
  return std::any_of(programs.begin(), programs.end(), [&](const auto& each) { return each->fits(arguments, now); });
}

CallResult StepCache::call(CallArguments arguments, const TracedFunction& step) {
  const NumericsScope numerics(settings_.numerics);
  // Inside a traced step, the function is part of the program of that step.
  if (settings_.backend == "eager" || compiling()) return {{step(nullptr).tensors}, nullptr};
  add_leaves(arguments);
  if (settings_.parallel_mode) check_data_parallel_arguments(*settings_.parallel_mode, arguments);
  return programs_.call(arguments, settings_, step,
                        {.what = "step",
                         .fall_back = !settings_.fullgraph && !settings_.parallel_mode,
                         .before_compile = [&] { before_compile(arguments); },
                         .find_loaded = [&](std::string& why) { return find_loaded(arguments, why); }});
}

void StepCache::refuse_or_warn(const std::string& reason) {
  TESSERA_CHECK(settings_.backend == "eager" || !settings_.fullgraph, UsageError, reason);
  if (refused_.insert(reason).second) TORCH_WARN("the step falls back to eager: ", reason);
}

void StepCache::before_compile(const CallArguments& arguments) {
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
