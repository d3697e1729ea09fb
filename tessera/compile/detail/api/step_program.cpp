#include "tessera/compile/detail/api/step_program.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/api/build_executable.h"
#include "tessera/compile/detail/api/partition_step.h"
#include "tessera/compile/detail/trace/local_tensors.h"
#include "tessera/nn/module_tree.h"
#include "tessera/tracing/detail/number_input.h"
#include "tessera/tracing/detail/restart_trace.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <map>
#include <set>
#include <unordered_set>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

// Notes the modules whose forward runs, through their holders.
class ReachedModules final : public OpMode {
 public:
  explicit ReachedModules(std::vector<const torch::nn::Module*>& modules) : modules_(modules) { modules_.clear(); }
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override {
    for (const auto* frame = innermost_module(); frame; frame = frame->outer)
      if (frame->name == &tessera::detail::path_of) {
        const auto* module = static_cast<const torch::nn::Module*>(frame->module);
        if (known_.insert(module).second) modules_.push_back(module);
      }
    next(op, keys, stack);
  }

 private:
  std::vector<const torch::nn::Module*>& modules_;
  std::unordered_set<const void*> known_;
};

// A trace that fails or is restarted has changed the gradients of leaves that are not inputs yet.
void restore_gradients_of_captured_leaves(TraceRun& run) {
  std::unordered_set<const void*> inputs;
  for (const auto& each : run.gradients()) inputs.insert(each.parameter.unsafeGetTensorImpl());
  for (const auto& leaf : run.tracer().leaves())
    if (!inputs.count(leaf.tensor.unsafeGetTensorImpl())) leaf.tensor.mutable_grad() = leaf.gradient;
}

// A leaf is guarded by identity: the program keeps the memory of its gradient.
void add_leaves(CallArguments& arguments) {
  for (const auto& t : arguments.tensors)
    if (t.defined() && t.is_leaf() && t.requires_grad()) arguments.leaves.push_back(t);
}

void collect_tree(const torch::nn::Module& module, std::unordered_set<const void*>& tree) {
  tree.insert(&module);
  for (const auto& child : module.children())
    if (child) collect_tree(*child, tree);
}

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
StepProgram::StepProgram(const CallArguments& arguments, const TracedFunction& function, const Settings& settings,
                         bool adds_to_gradients)
    : gradient_placeholders_(!adds_to_gradients) {
  const auto scope = adds_to_gradients ? CompilingScope::Region::Part : CompilingScope::Region::Step;
  const std::function<Tensors()> step = [&] { return function(nullptr); };
  TraceRequest request{step, settings, scope};
  number_is_key_.assign(arguments.numbers.size(), adds_to_gradients);
  if (!arguments.numbers.empty() && !adds_to_gradients) find_number_inputs(arguments, function, settings, scope, false);
  for (;;) {
    const auto outcome = trace_until_settled(arguments, request);
    if (outcome == TraceOutcome::Done) break;
    find_number_inputs(arguments, function, settings, scope, outcome == TraceOutcome::NumbersDiffer);
  }
  number_traces_.clear();
  signature_ = Signature(arguments, number_is_key_);
  guard_captures(arguments);
  check_again_ = !reads_live_ && !settings.captures_none && (settings.has_captures || !signature_.is_complete());
}

// Traces until the inputs are known: Done, FoundLiveNumbers or NumbersDiffer.
StepProgram::TraceOutcome StepProgram::trace_until_settled(const CallArguments& arguments, TraceRequest& request) {
  constexpr int kMaxTraces = 8;  // the second trace finds all captured leaves, unless the step creates new ones
  for (int traces = 0; traces < kMaxTraces;) {
    const auto outcome = trace(arguments, request);
    if (outcome == TraceOutcome::ReadsOldGradients) gradient_placeholders_ = false;
    if (outcome == TraceOutcome::Restarted) traces_ = {};
    if (outcome == TraceOutcome::ReadsOldGradients || outcome == TraceOutcome::FoundLeaves)
      traces++;
    else if (outcome != TraceOutcome::Restarted && outcome != TraceOutcome::Unconfirmed)
      return outcome;
  }
  TESSERA_FAIL(UsageError, "compile: every run of the step uses a new leaf tensor that requires gradients, of shape ",
               captured_.back().sizes(),
               ", and keeps it alive; create it outside of the step, or release it before the step returns");
}

// Traces the step with marks in place of numbers, all at once or one by one. A number without traces is a key.
void StepProgram::find_number_inputs(const CallArguments& arguments, const TracedFunction& function,
                                     const Settings& settings, CompilingScope::Region scope, bool one_by_one) {
  constexpr size_t kMaxNumbers = 16;  // that are traced one by one
  const size_t numbers = arguments.numbers.size() + live_.size();
  number_traces_.clear();
  const auto try_marks = [&](int only) {
    NumberTraces traces{only, {}, {}};
    for (const bool negative : {false, true}) {
      auto values = arguments.numbers;
      for (size_t i = 0; i < values.size(); i++)
        if (only < 0 || static_cast<size_t>(only) == i) values[i] = number_mark(i, negative);
      const std::function<Tensors()> step = [&] { return function(&values); };
      TraceRequest request{step, settings, scope};
      request.text_only = negative ? &traces.negative : &traces.positive;
      request.marks = MarkedNumbers{negative, only};
      try {
        trace_until_settled(arguments, request);
      } catch (const std::exception&) {  // for example a check of the number's range; a real error is thrown again
        return false;
      }
      if (request.host_has_read) return false;
    }
    number_traces_.push_back(std::move(traces));
    return true;
  };
  if (!one_by_one && try_marks(-1)) return;
  if (numbers == 1 && !one_by_one) return;
  for (size_t i = 0; i < numbers && numbers <= kMaxNumbers; i++) try_marks(static_cast<int>(i));
}

StepProgram::TraceOutcome StepProgram::trace(const CallArguments& given, TraceRequest& request) {
  auto arguments = given;
  arguments.leaves.insert(arguments.leaves.end(), captured_.begin(), captured_.end());
  TraceRun run(lift(arguments), gradient_placeholders_, traces_.generators());

  LiveNumberScope live(live_, given.numbers.size());
  if (request.marks) live.substitute(request.marks->negative, request.marks->only);
  if (!record(run, arguments, request)) return TraceOutcome::Restarted;
  stream_ = run.random().advance();
  guards_ = CompilingScope::take_guards();
  on_replay_ = CompilingScope::take_effects();
  const bool is_step = request.scope == CompilingScope::Region::Step;
  if (is_step) traces_.check_captured(run.tracer());
  if (collect_captured_leaves(run, request.settings)) return TraceOutcome::FoundLeaves;
  const bool found_live = live.variables().size() > live_.size();
  live_ = live.variables();
  reads_live_ |= live.any_read();
  if (found_live && !request.text_only) return TraceOutcome::FoundLiveNumbers;

  const auto was_read = [&](const TraceRun::SavedGradient& each) {
    return each.during_trace().defined() && run.tracer().was_used(local_or_self(each.during_trace()));
  };
  const bool undefined = run.any_gradient_undefined();
  const bool reads_old_gradients =
      (undefined && !gradient_placeholders_) || std::any_of(run.gradients().begin(), run.gradients().end(), was_read);
  if (reads_old_gradients && undefined && gradient_placeholders_) return TraceOutcome::ReadsOldGradients;

  collect_gradients(run, reads_old_gradients);
  run.restore_memory();
  auto traced = run.tracer().finish();
  if (request.text_only) {
    *request.text_only = TraceText(traced);
    return TraceOutcome::Done;
  }
  if (is_step && !traces_.confirms(traced)) return TraceOutcome::Unconfirmed;
  traces_ = {};
  traced_text_ = TraceText(traced);
  if (!mark_number_inputs(traced.program, given)) return TraceOutcome::NumbersDiffer;
  build(std::move(traced), run, arguments, request.settings);
  return TraceOutcome::Done;
}

// Replaces constants that are numbers of the call by runtime scalars. False: the traces with marks for all numbers at
// once differ from this one.
bool StepProgram::mark_number_inputs(Program& program, const CallArguments& arguments) {
  const auto numbers = numbers_of(arguments);
  std::vector<bool> is_input(numbers.size(), false);
  number_uses_.clear();
  for (const auto& traces : number_traces_) {
    std::vector<NumberUse> uses;
    bool found = find_number_uses(traced_text_, traces.positive, traces.negative, numbers, uses);
    for (const auto& use : uses)  // a number in place of a tensor: replay cannot exchange it
      found &= program.nodes[use.node].schema().arguments()[use.argument].type()->kind() != c10::TypeKind::TensorType;
    if (!found && traces.only < 0 && numbers.size() > 1) return false;
    if (!found) continue;
    if (traces.only < 0)
      is_input.assign(numbers.size(), true);
    else
      is_input[static_cast<size_t>(traces.only)] = true;
    number_uses_.insert(number_uses_.end(), uses.begin(), uses.end());
  }
  std::sort(number_uses_.begin(), number_uses_.end(),
            [](const auto& a, const auto& b) { return std::pair(a.node, a.argument) < std::pair(b.node, b.argument); });
  for (size_t i = 0; i < number_is_key_.size(); i++) number_is_key_[i] = !is_input[i];
  // A live number that is not an input is guarded.
  for (size_t i = 0; i < live_.size(); i++)
    if (!is_input[number_is_key_.size() + i]) {
      const auto read = [variable = live_[i]] { return std::bit_cast<int64_t>(*variable); };
      guards_.push_back({read, read()});
    }
  std::map<size_t, int32_t> indices;
  for (const auto& use : number_uses_) {
    const auto [index, added] = indices.try_emplace(use.number, static_cast<int32_t>(program.numbers.size()));
    if (added)
      program.numbers.push_back({c10::str("number", use.number),
                                 [values = number_values_, i = use.number] { return c10::IValue((*values)[i]); }});
    program.nodes[use.node].args[use.argument] = RuntimeScalar{index->second, use.negated};
  }
  return true;
}

// The numbers of the call, then those behind ts::live().
std::vector<double> StepProgram::numbers_of(const CallArguments& arguments) const {
  auto numbers = arguments.numbers;
  for (const auto* variable : live_) numbers.push_back(*variable);
  return numbers;
}

// Runs the step under the tracer and adds its results as outputs. false: RestartTrace was thrown.
bool StepProgram::record(TraceRun& run, const CallArguments& arguments, TraceRequest& request) {
  CompilingScope::take_guards();  // of an earlier trace that failed
  CompilingScope::take_effects();
  try {
    UnshardedParameters unsharded;
    CompilingScope compiling(&unsharded, request.scope);
    const OpModeScope recording(run.tracer());
    ReachedModules reached(reached_modules_);
    const OpModeScope noting_modules(reached);
    if (request.settings.parallel_mode) unsharded.unshard(*request.settings.parallel_mode, arguments);
    Tensors returned;
    if (request.marks) {
      const NumberProbe probe;
      returned = run.call(request.step);
      request.host_has_read = probe.host_has_read();
    } else {
      returned = run.call(request.step);
    }
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
    restore_gradients_of_captured_leaves(run);
    return false;
  } catch (...) {
    restore_gradients_of_captured_leaves(run);
    throw;
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
  captured_tensors_.clear();
  for (const auto& leaf : captured_) captured_tensors_.push_back({leaf, {}});
  for (const auto& input : traced.program.inputs) {
    const auto& owner = traced.owners[static_cast<size_t>(traced.program.buffer_of(input.value))];
    if (input.role == Role::Captured && owner.defined() && !input.name.starts_with("constant "))
      captured_tensors_.push_back({owner, {}});
  }
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
  const auto& program = executable_->program();
  const auto external = program.external_buffers();
  std::set<int32_t> written;
  for (const auto& node : program.nodes)
    node.each_write([&](ValueId id) {
      if (external[static_cast<size_t>(program.buffer_of(id))]) written.insert(program.buffer_of(id));
    });
  written_buffers_.assign(written.begin(), written.end());
  refresh_gradients();
}

// Guards for what the step uses although it is not among its arguments.
void StepProgram::guard_captures(const CallArguments& arguments) {
  for (auto& each : captured_tensors_) each.guard = TensorGuard(each.tensor);
  for (auto& each : captured_tensors_) each.uses = each.tensor.use_count();
  std::unordered_set<const void*> known;
  for (const auto* module : arguments.modules) collect_tree(*module, known);
  for (const auto* module : std::exchange(reached_modules_, {})) {
    if (known.count(module)) continue;
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): for a weak pointer
    auto weak = const_cast<torch::nn::Module*>(module)->weak_from_this();
    if (weak.expired()) continue;  // not in a holder: the checks of captured variables see it
    captured_modules_.push_back({std::move(weak), ModuleGuard(*module, {})});
    collect_tree(*module, known);
  }
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

bool StepProgram::fits(const CallArguments& arguments, const ThreadState& now, std::string* why) const {
  const auto fails = [&](const char* reason) {
    if (why) *why = reason;
    return false;
  };
  if (!signature_.holds(arguments, now, why)) return false;
  for (const auto& [tensor, guard, uses] : captured_tensors_) {
    if (tensor.use_count() < uses) return fails("a captured tensor was replaced");
    if (!guard.holds(tensor)) {
      if (why) *why = "a captured tensor is " + guard.difference(tensor);
      return false;
    }
  }
  for (const auto& [module, guard] : captured_modules_) {
    const auto alive = module.lock();
    if (!alive) return fails("a captured module was replaced");
    if (!guard.holds(*alive, why)) {
      if (why) *why = "of a captured module, " + *why;
      return false;
    }
  }
  const auto holds = [](const auto& guard) { return guard.holds(); };
  if (!std::all_of(guards_.begin(), guards_.end(), holds))
    return fails("the state of an optimizer, of FSDP or DDP, or a ts::live() value has changed");
  if (!std::all_of(gradient_guards_.begin(), gradient_guards_.end(), holds))
    return fails("a gradient that the step adds to was undefined and is defined, or the reverse, or has another type");
  if (!bindings_.fits(arguments)) return fails("an argument shares memory with a parameter, or no longer does");
  return true;
}

std::string StepProgram::why_not(const CallArguments& arguments, const ThreadState& now) const {
  std::string why;
  fits(arguments, now, &why);
  return why;
}

// Traces the function once more. A trace overwrites what it collects, and the program keeps its own.
TraceText StepProgram::trace_for_check(const CallArguments& arguments, const TracedFunction& function,
                                       const Settings& settings) {
  auto collected = [this] {
    return std::tie(stream_, guards_, on_replay_, captured_, gradients_, external_gradients_, without_gradient_,
                    gradient_guards_, returned_specs_, gradient_placeholders_, live_, reached_modules_);
  };
  const auto kept = std::apply([](const auto&... each) { return std::tuple(each...); }, collected());
  TraceText now;
  traces_ = {};
  const std::function<Tensors()> step = [&] { return function(nullptr); };
  TraceRequest request{step, settings, CompilingScope::Region::Step};
  request.text_only = &now;
  try {
    trace_until_settled(arguments, request);
  } catch (...) {
    collected() = kept;
    traces_ = {};
    throw;
  }
  collected() = kept;
  traces_ = {};
  return now;
}

void StepProgram::check_again_if_due(const CallArguments& arguments, const TracedFunction& function,
                                     const Settings& settings) {
  const auto call = ++calls_ + 1;  // the first call has compiled
  const bool is_power_of_two = (call & (call - 1)) == 0;
  if (call > settings.check && !(check_again_ && is_power_of_two)) return;
  const auto now = trace_for_check(arguments, function, settings);
  const auto text = difference(now, traced_text_, number_uses_, numbers_of(arguments));
  TESSERA_CHECK(text.empty(), UsageError,
                "compile: something that the step reads and that is not among its arguments, for example a captured "
                "variable, has changed since the step was traced: ",
                text,
                ". Results since the last check may be wrong. Pass it as an argument, or declare it with ts::live(x)");
}

// Memory that the program writes, gradients and random state.
std::function<void()> StepProgram::save_before_run(const CallArguments& arguments) const {
  const at::NoGradGuard no_grad;
  const OpModesOff off;
  std::vector<std::pair<at::Tensor, at::Tensor>> memory;
  const auto save = [&](const at::Tensor& t) {
    if (t.defined()) memory.emplace_back(local_or_self(t).detach(), local_or_self(t).detach().clone());
  };
  for (const auto buffer : written_buffers_) save(bindings_.tensor_of(buffer, arguments));
  Tensors parameters, gradients;
  for (const auto& each : gradients_) {
    parameters.push_back(each.parameter);
    gradients.push_back(each.parameter.grad());
    save(each.parameter.grad());
  }
  return [memory, parameters, gradients, generator = at::detail::getDefaultCPUGenerator(),
          state = at::detail::getDefaultCPUGenerator().get_state(), stream = random::state()]() mutable {
    const at::NoGradGuard guard;
    for (auto& [tensor, before] : memory) tensor.copy_(before);
    for (size_t i = 0; i < parameters.size(); i++) parameters[i].mutable_grad() = gradients[i];
    generator.set_state(state);
    random::state() = stream;
  };
}

Tensors StepProgram::run(const CallArguments& arguments) {
  *number_values_ = numbers_of(arguments);
  bindings_.bind(*executable_, arguments);
  detach_shared_gradients();
  executable_->run();
  stream_.apply();
  for (auto& each : gradients_)
    if (!each.parameter.grad().is_same(each.gradient)) each.parameter.mutable_grad() = each.gradient;
  for (const auto& each : external_gradients_) each.parameter.mutable_grad() = each.gradient;
  for (const auto& parameter : without_gradient_) parameter.mutable_grad().reset();
  for (const auto& repeat : on_replay_) repeat();
  for (auto& each : gradients_)  // after the effects: FSDP keeps a reference to its flat gradient
    if (each.storage_uses == 0) each.storage_uses = local_or_self(each.gradient).storage().use_count();
  Tensors returned;
  for (const auto& output : executable_->program().outputs)
    if (output.kind == Output::Kind::Return)
      returned.push_back(wrap_with_spec(executable_->output(output), returned_specs_[returned.size()]));
  if (executable_->runs() == 1) signature_.exclude_changed_members();
  return returned;
}

bool StepCache::has_program_for(CallArguments arguments) const {
  add_leaves(arguments);
  const auto now = ThreadState::now();
  const auto& programs = programs_.programs();
  return std::any_of(programs.begin(), programs.end(), [&](const auto& each) { return each->fits(arguments, now); });
}

CallResult StepCache::call(CallArguments arguments, const TracedFunction& step) {
  // Inside a traced step, the function is part of the program of that step.
  if (settings_.backend == "eager" || compiling()) return {step(nullptr), nullptr};
  add_leaves(arguments);
  if (settings_.parallel_mode) check_data_parallel_arguments(*settings_.parallel_mode, arguments);
  return programs_.call(arguments, settings_, step,
                        {.what = "step",
                         .fall_back = !settings_.fullgraph && !settings_.parallel_mode,
                         .before_compile = [&] { before_compile(arguments); }});
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
