#include "tessera/compile/detail/api/traced_program.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/api/classic_locale.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/nn/module_tree.h"
#include "tessera/tracing/detail/number_input.h"
#include "tessera/tracing/detail/restart_trace.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <algorithm>
#include <bit>
#include <map>
#include <unordered_set>

namespace tessera::compiler {
namespace {

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

// Casts of parameters in the cache of autocast: those from before a trace would be constants of the program, and those
// of the trace are memory of the program.
struct NoCachedCasts {
  NoCachedCasts() { at::autocast::clear_cache(); }
  ~NoCachedCasts() { at::autocast::clear_cache(); }
  NoCachedCasts(const NoCachedCasts&) = delete;
};

// A trace that fails or is restarted has changed the gradients of leaves that are not inputs yet.
void restore_gradients_of_captured_leaves(TraceRun& run) {
  std::unordered_set<const void*> inputs;
  for (const auto& each : run.gradients()) inputs.insert(each.parameter.unsafeGetTensorImpl());
  for (const auto& leaf : run.tracer().leaves())
    if (!inputs.count(leaf.tensor.unsafeGetTensorImpl())) leaf.tensor.mutable_grad() = leaf.gradient;
}

void collect_tree(const torch::nn::Module& module, std::unordered_set<const void*>& tree) {
  tree.insert(&module);
  for (const auto& child : module.children())
    if (child) collect_tree(*child, tree);
}

bool draws_from_generators(const Program& program) {
  return std::any_of(program.nodes.begin(), program.nodes.end(), [](const Node& node) {
    return kind_of(node) == OpKind::Random && !node.op.operator_name().name.starts_with("tessera::philox_");
  });
}

// A wrapped number is a constant of the trace, and a tangent is in none of the inputs. Anomaly mode reads values.
void check_inputs(const CallArguments& arguments) {
  TESSERA_CHECK(!torch::autograd::AnomalyMode::is_enabled() || !torch::autograd::AnomalyMode::should_check_nan(),
                UsageError,
                "compile: anomaly mode looks for NaN in every gradient, so the step depends on values, which a program "
                "cannot read; turn it off, or call the step itself");
  for (const auto& [tensor, role, name] : lift(arguments))
    TESSERA_CHECK(!TensorGuard(tensor).cannot_be_input(), UsageError, "compile: ", role, " ", name, " is ",
                  TensorGuard::describe(tensor),
                  ", which cannot be an input of a program: clone() it; use forward-mode AD outside of the step");
}

}  // namespace

void TracedProgram::compile(const CallArguments& arguments, const TracedFunction& function, const Settings& settings,
                            CompilingScope::Region region, bool confirmed) {
  check_inputs(arguments);
  const ClassicLocaleScope numbers_in_text;
  region_ = region;
  confirmed_ = confirmed;
  const std::function<Tensors()> run = [&] { return call_and_keep_numbers(function, nullptr); };
  TraceRequest request{run, settings};
  number_is_key_.assign(arguments.numbers.size(), !confirmed);
  if (!arguments.numbers.empty() && confirmed) find_number_inputs(arguments, function, settings, false);
  for (;;) {
    const auto outcome = trace_until_settled(arguments, request);
    if (outcome == TraceOutcome::Done) break;
    find_number_inputs(arguments, function, settings, outcome == TraceOutcome::NumbersDiffer);
  }
  number_traces_.clear();
  signature_ = Signature(arguments, number_is_key_);
  guard_captures(arguments);
  check_again_ = confirmed && !reads_live_ && !settings.captures_none;
  check_values_ = settings.has_captures || !signature_.is_complete();
}

Tensors TracedProgram::call_and_keep_numbers(const TracedFunction& function, const std::vector<double>* numbers) {
  auto result = function(numbers);
  leaves_ = std::move(result.leaves);
  return std::move(result.tensors);
}

// Traces until the inputs are known: Done, FoundLiveNumbers or NumbersDiffer.
TracedProgram::TraceOutcome TracedProgram::trace_until_settled(const CallArguments& arguments, TraceRequest& request) {
  constexpr int kMaxTraces = 8;  // the second trace finds all captured leaves, unless the function creates new ones
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

// Traces the function with marks in place of numbers, all at once or one by one. A number without traces is a key.
void TracedProgram::find_number_inputs(const CallArguments& arguments, const TracedFunction& function,
                                       const Settings& settings, bool one_by_one) {
  constexpr size_t kMaxNumbers = 16;  // that are traced one by one
  const size_t numbers = arguments.numbers.size() + live_.size();
  number_traces_.clear();
  if (!NumberProbe::is_possible()) return;  // all numbers are keys
  const auto try_marks = [&](int only) {
    NumberTraces traces{only, {}, {}};
    for (const bool negative : {false, true}) {
      auto values = arguments.numbers;
      for (size_t i = 0; i < values.size(); i++)
        if (only < 0 || static_cast<size_t>(only) == i) values[i] = number_mark(i, negative);
      const std::function<Tensors()> run = [&] { return call_and_keep_numbers(function, &values); };
      TraceRequest request{run, settings};
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

TracedProgram::TraceOutcome TracedProgram::trace(const CallArguments& given, TraceRequest& request) {
  auto arguments = given;
  arguments.leaves.insert(arguments.leaves.end(), captured_.begin(), captured_.end());
  TraceRun run(lift(arguments), gradient_placeholders_, traces_.generators());

  LiveNumberScope live(live_, given.numbers.size());
  if (request.marks) live.substitute(request.marks->negative, request.marks->only);
  if (!record_or_restart(run, arguments, request)) return TraceOutcome::Restarted;
  stream_ = run.random().advance();
  guards_ = CompilingScope::take_guards();
  on_replay_ = CompilingScope::take_effects();
  if (confirmed_) traces_.check_captured(run.tracer());
  if (collect_captured_leaves(run, arguments, request.settings)) return TraceOutcome::FoundLeaves;
  const bool found_live = live.variables().size() > live_.size();
  live_ = live.variables();
  reads_live_ |= live.any_read();
  if (found_live && !request.text_only) return TraceOutcome::FoundLiveNumbers;
  if (const auto outcome = collect(run); outcome != TraceOutcome::Done) return outcome;

  run.restore_memory();
  auto traced = run.tracer().finish();
  if (request.text_only) {
    *request.text_only = TraceText(traced, leaves_);
    return TraceOutcome::Done;
  }
  if (confirmed_ && !traces_.confirms(traced, leaves_.text())) return TraceOutcome::Unconfirmed;
  generators_ = draws_from_generators(traced.program) ? traces_.generators() : std::vector<at::Generator>();
  traces_ = {};
  traced_text_ = TraceText(traced, leaves_);
  returned_numbers_ = leaves_.numbers;
  if (!mark_number_inputs(traced.program, given)) return TraceOutcome::NumbersDiffer;
  note_captured_tensors(traced);
  build(std::move(traced), run, arguments, request.settings);
  return TraceOutcome::Done;
}

// Runs the function under the tracer. false: RestartTrace was thrown.
bool TracedProgram::record_or_restart(TraceRun& run, const CallArguments& arguments, TraceRequest& request) {
  CompilingScope::take_guards();  // of an earlier trace that failed
  CompilingScope::take_effects();
  const NoCachedCasts none_before;
  try {
    record(run, arguments, request);
  } catch (const RestartTrace&) {
    restore_gradients_of_captured_leaves(run);
    return false;
  } catch (...) {
    restore_gradients_of_captured_leaves(run);
    throw;
  }
  return true;
}

Tensors TracedProgram::call_function(TraceRun& run, TraceRequest& request) {
  ReachedModules reached(reached_modules_);
  const OpModeScope noting_modules(reached);
  if (!request.marks) return run.call(request.function);
  const NumberProbe probe;
  auto returned = run.call(request.function);
  request.host_has_read = probe.host_has_read();
  return returned;
}

// Replaces constants that are numbers of the call by runtime scalars. False: the traces with marks for all numbers at
// once differ from this one.
bool TracedProgram::mark_number_inputs(Program& program, const CallArguments& arguments) {
  const auto numbers = numbers_of(arguments);
  std::vector<bool> is_input(numbers.size(), false);
  number_uses_.clear();
  returned_number_uses_.clear();
  for (const auto& traces : number_traces_) {
    std::vector<NumberUse> uses;
    bool found = find_number_uses(traced_text_, traces.positive, traces.negative, numbers, uses);
    for (const auto& use : uses)  // a number in place of a tensor: replay cannot exchange it
      if (use.node < program.nodes.size())
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
    if (use.node >= program.nodes.size()) {
      returned_number_uses_.push_back(use);
      continue;
    }
    const auto [index, added] = indices.try_emplace(use.number, static_cast<int32_t>(program.numbers.size()));
    if (added)
      program.numbers.push_back({c10::str("number", use.number),
                                 [values = number_values_, i = use.number] { return c10::IValue((*values)[i]); }});
    program.nodes[use.node].args[use.argument] = RuntimeScalar{index->second, use.negated};
  }
  return true;
}

// The numbers of the call, then those behind ts::live().
std::vector<double> TracedProgram::numbers_of(const CallArguments& arguments) const {
  auto numbers = arguments.numbers;
  for (const auto* variable : live_) numbers.push_back(*variable);
  return numbers;
}

// Those of the trace, but for numbers of the call.
std::vector<double> TracedProgram::returned_numbers() const {
  auto numbers = returned_numbers_;
  for (const auto& use : returned_number_uses_) {
    const auto number = (*number_values_)[use.number];
    numbers[use.argument] = use.negated ? -number : number;
  }
  return numbers;
}

// Were there leaves that are not inputs yet? A leaf that only the tracer references was created by the function itself.
bool TracedProgram::collect_captured_leaves(TraceRun& run, const CallArguments& arguments, const Settings& settings) {
  std::unordered_set<const void*> inputs;
  for (const auto& each : run.gradients()) inputs.insert(each.parameter.unsafeGetTensorImpl());
  for (const auto& each : arguments.tensors) inputs.insert(each.unsafeGetTensorImpl());
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

void TracedProgram::note_captured_tensors(const Tracer::Result& traced) {
  captured_tensors_.clear();
  for (const auto& leaf : captured_) captured_tensors_.push_back({leaf, {}});
  for (const auto& input : traced.program.inputs) {
    const auto& owner = traced.owners[static_cast<size_t>(traced.program.buffer_of(input.value))];
    if (input.role == Role::Captured && owner.defined() && !input.name.starts_with("constant "))
      captured_tensors_.push_back({owner, {}});
  }
}

// Guards for what the function uses although it is not among its arguments.
void TracedProgram::guard_captures(const CallArguments& arguments) {
  for (auto& each : captured_tensors_) each.guard = TensorGuard(each.tensor);
  for (auto& each : captured_tensors_) each.uses = each.tensor.use_count();
  std::unordered_set<const void*> known;
  for (const auto* module : arguments.modules) collect_tree(*module, known);
  for (const auto* module : std::exchange(reached_modules_, {})) {
    if (known.count(module)) continue;
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): for a weak pointer
    auto weak = const_cast<torch::nn::Module*>(module)->weak_from_this();
    const auto alive = weak.lock();
    if (!alive) continue;  // not in a holder: the checks of captured variables see it
    captured_modules_.push_back({std::move(weak), ModuleGuard(*module, ModuleGuard::object_of(alive))});
    collect_tree(*module, known);
  }
}

bool TracedProgram::fits(const CallArguments& arguments, const ThreadState& now, std::string* why,
                         bool state_holds) const {
  const auto fails = [&](const char* reason) {
    if (why) *why = reason;
    return false;
  };
  if (!signature_.holds(arguments, now, why, state_holds)) return false;
  for (const auto& [tensor, guard, uses] : captured_tensors_) {
    if (tensor.use_count() < uses) return fails("a captured tensor was replaced");
    if (!state_holds && !guard.holds(tensor)) {
      if (why) *why = "a captured tensor is " + guard.difference(tensor);
      return false;
    }
  }
  for (const auto& [module, guard] : captured_modules_) {
    const auto alive = module.lock();
    if (!alive) return fails("a captured module was replaced");
    if (!state_holds && !guard.holds(*alive, why)) {
      if (why) *why = "of a captured module, " + *why;
      return false;
    }
  }
  if (!std::all_of(guards_.begin(), guards_.end(), [](const auto& guard) { return guard.holds(); }))
    return fails("the state of an optimizer, of FSDP or DDP, or a ts::live() value has changed");
  if (!more_guards_hold(arguments, why)) return false;
  if (!bindings_.fits(arguments, state_holds))
    return fails("an argument shares memory with a parameter, or no longer does");
  return true;
}

// Is all memory that the guards of modules, leaves and captures read as it was when they held last?
bool TracedProgram::state_is_unchanged(const CallArguments& arguments) const {
  return signature_.has_same_objects(arguments) &&
         std::none_of(captured_modules_.begin(), captured_modules_.end(),
                      [](const auto& captured) { return captured.module.expired(); }) &&
         snapshot_.unchanged();
}

bool TracedProgram::fits(const CallArguments& arguments, const ThreadState& now) const {
  return fits(arguments, now, nullptr, state_is_unchanged(arguments));
}

bool TracedProgram::fits_and_remember(const CallArguments& arguments, const ThreadState& now) {
  const bool unchanged = state_is_unchanged(arguments);
  if (!fits(arguments, now, nullptr, unchanged)) return false;
  if (unchanged) return true;
  snapshot_.clear();
  const auto add = [&](const auto& guard, const auto&... tensor) { return guard.add_to(snapshot_, tensor...); };
  const bool known = signature_.add_to(snapshot_) &&
                     std::all_of(captured_tensors_.begin(), captured_tensors_.end(),
                                 [&](const auto& each) { return add(each.guard, each.tensor); }) &&
                     std::all_of(captured_modules_.begin(), captured_modules_.end(),
                                 [&](const auto& each) { return add(each.guard); });
  if (known)
    bindings_.add_to(snapshot_);
  else
    snapshot_.clear();
  return true;
}

std::string TracedProgram::why_not(const CallArguments& arguments, const ThreadState& now) const {
  std::string why;
  fits(arguments, now, &why, false);
  return why;
}

void TracedProgram::exclude_changed_members() {
  signature_.exclude_changed_members();
  for (auto& [module, guard] : captured_modules_)
    if (const auto alive = module.lock()) guard.exclude_changed_members();
}

}  // namespace tessera::compiler
