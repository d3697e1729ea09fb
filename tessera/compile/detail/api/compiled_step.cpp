#include "tessera/compile/detail/api/compiled_step.h"

#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/base/error.h"
#include "tessera/base/detail/warn_once.h"
#include "tessera/tracing/detail/restart_trace.h"
#include "tessera/compile/detail/ir/program_agreement.h"
#include "tessera/compile/detail/codegen/lower.h"
#include "tessera/compile/detail/trace/plain.h"
#include "tessera/compile/detail/trace/random_streams.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <unordered_set>

namespace tessera::compiler {
namespace {

bool is_like(const at::Tensor& gradient, const std::optional<Type>& then) {
  if (!gradient.defined() || !then) return gradient.defined() == then.has_value();
  const auto& plain = plain_of(gradient);
  return plain.sizes() == at::IntArrayRef(then->sizes) && plain.strides() == at::IntArrayRef(then->strides) &&
         plain.scalar_type() == then->dtype;
}

// What autograd knows of where a tensor comes from.
const void* history_of(const at::Tensor& t) { return t.defined() ? t.grad_fn().get() : nullptr; }

}  // namespace

CompiledProgram::CompiledProgram(const Arguments& arguments, const std::function<Tensors()>& step,
                                 const Settings& options, bool keeps_gradients)
    : signature_(signature_of(arguments)) {
  const auto of = keeps_gradients ? CompilingScope::Of::Part : CompilingScope::Of::Step;
  bool with_stand_ins = !keeps_gradients;
  constexpr int kMost = 8;  // a second look finds all that was captured, unless every look makes it anew
  for (int i = 0; i < kMost;) {
    const auto traced = trace(arguments, step, options, of, with_stand_ins);
    if (traced == Traced::Done) return;
    if (traced == Traced::NeedsGradients) with_stand_ins = false;
    if (traced != Traced::Disturbed) i++;
  }
  TESSERA_FAIL(UsageError,
               "compile: whenever the step runs it computes with another leaf that requires gradients, of "
               "shape ",
               captured_.back().sizes(), ", and keeps it; make it outside of the step, or let go of it");
}

// Gradients that are not there get stand-ins at first. If the step never looks at a gradient of before, because it sets
// them to none itself, one program serves whether they are there or not; else it is traced as things are. A leaf that
// only shows up on the way, because the step captured it, is treated like one that was given, from the next trace on.
CompiledProgram::Traced CompiledProgram::trace(const Arguments& given, const std::function<Tensors()>& step,
                                               const Settings& options, CompilingScope::Of of, bool with_stand_ins) {
  auto arguments = given;
  arguments.leaves.insert(arguments.leaves.end(), captured_.begin(), captured_.end());
  auto lifted = lift(arguments);
  struct Before {
    at::Tensor parameter, gradient, stand_in;
    std::string name;
  };
  std::vector<Before> before;
  std::unordered_set<const void*> known;
  bool missing = false;
  for (size_t i = 0, n = lifted.size(); i < n; i++) {
    if (lifted[i].role != Role::Parameter || !lifted[i].handle.requires_grad()) continue;
    known.insert(lifted[i].handle.unsafeGetTensorImpl());
    Before each{lifted[i].handle, lifted[i].handle.grad(), {}, lifted[i].name};
    if (!each.gradient.defined()) {
      missing = true;
      if (with_stand_ins) {
        const at::NoGradGuard no_grad;
        each.stand_in = at::zeros_like(each.parameter);
        lifted.push_back({each.stand_in, Role::Gradient, each.name});
      }
    }
    before.push_back(std::move(each));
  }
  const auto put_back = [&] {
    for (auto& each : before) each.parameter.mutable_grad() = each.gradient;
  };
  for (auto& each : before)
    if (each.stand_in.defined()) each.parameter.mutable_grad() = each.stand_in;

  std::vector<const void*> histories;
  for (const auto& each : lifted) histories.push_back(history_of(each.handle));

  CompilingScope::take_guards();
  CompilingScope::take_effects();
  const StreamsRestored streams;
  Tracer tracer(lifted, streams.live_numbers());
  try {
    WholeParameters whole;
    CompilingScope compiling(&whole, of);
    const OpModeScope on(tracer);
    if (options.parallel_mode) whole.open(*options.parallel_mode, arguments);
    auto returned = step();
    whole.close();
    const at::NoGradGuard no_grad;
    returned_.clear();
    for (const auto& t : returned) {
      const auto plain = t.defined() ? plain_of(t) : at::Tensor();
      returned_.push_back(t.defined() && is_dtensor(t) ? tessera::detail::meta_of(t).spec : SpecRef());
      tracer.put_out(plain, Output::Kind::Return, "");
    }
    for (const auto& each : before)
      if (each.parameter.grad().defined()) plain_of(each.parameter.grad());  // waits for what is pending
    for (size_t i = 0; i < histories.size(); i++) {
      if (history_of(lifted[i].handle) == histories[i]) continue;
      lifted[i].handle.detach_();
      TESSERA_FAIL(UsageError, "compile: the step wrote to ", lifted[i].role, " ", lifted[i].name, ", of shape ",
                   lifted[i].handle.sizes(),
                   ", in a way that gradients flow through, and it would go on doing so in the next step; write under "
                   "torch::NoGradGuard, or to a copy");
    }
    compiling.finish();
  } catch (const RestartTrace&) {
    tracer.restore();
    put_back();
    return Traced::Disturbed;
  } catch (...) {
    tracer.restore();
    put_back();
    throw;
  }
  draws_ = streams.draws();
  guards_ = CompilingScope::take_guards();
  effects_ = CompilingScope::take_effects();
  const auto captured_before = captured_.size();
  for (const auto& leaf : tracer.leaves()) {
    if (known.count(leaf.handle.unsafeGetTensorImpl())) continue;
    if (leaf.handle.use_count() == 1) continue;  // only the tracer has it: the step made it, of memory from outside
    captured_.push_back(leaf.handle);
    leaf.handle.mutable_grad() = leaf.gradient;
  }
  if (captured_.size() > captured_before) {
    tracer.restore();
    put_back();
    TESSERA_CHECK(!options.parallel_mode, UsageError, "compile: the step uses a parameter of shape ",
                  captured_.back().sizes(),
                  " that is not one of its arguments' (a lambda that captures its model?); under DataParallel the "
                  "model must be an argument, or its parameters would stay as they are on every rank");
    return Traced::FoundLeaves;
  }

  const auto old_of = [](const Before& each) -> const at::Tensor& {
    return each.stand_in.defined() ? each.stand_in : each.gradient;
  };
  bool depends = missing && !with_stand_ins;
  for (const auto& each : before) {
    const auto& old = old_of(each);
    depends |= old.defined() && tracer.was_used(plain_of(old));
  }
  if (depends && missing && with_stand_ins) {
    tracer.restore();
    put_back();
    return Traced::NeedsGradients;
  }
  std::vector<Bindings::OldGradient> old_gradients;
  gradients_.clear();
  outside_.clear();
  without_gradient_.clear();
  slots_.clear();
  for (auto& each : before) {
    if (depends)
      slots_.push_back(
          {each.parameter, each.gradient.defined() ? std::optional(Type::of(plain_of(each.gradient))) : std::nullopt});
    if (each.gradient.defined()) old_gradients.push_back({each.parameter, each.gradient});
    const auto& now = each.parameter.grad();
    if (now.defined() && tracer.made(plain_of(now))) {
      tracer.put_out(plain_of(now), Output::Kind::Gradient, each.name);
      gradients_.push_back({each.parameter, now});
    } else if (now.defined() && !now.is_same(old_of(each))) {
      outside_.push_back({each.parameter, now});
    } else if (!now.defined()) {
      without_gradient_.push_back(each.parameter);
    }
  }
  tracer.restore();

  auto traced = tracer.finish();
  auto& program = traced.program;
  TESSERA_CHECK(!program.nodes.empty(), UsageError,
                "compile: the step did nothing with tensors; there is nothing to compile");
  TraceRecorder record(options.trace, arguments.what, program);
  report_ = run_passes(program, options.passes, options.verified);
  for (auto& each : lower(program, options)) report_.push_back(std::move(each));
  agree_on(program);
  traced.storages.resize(static_cast<size_t>(program.buffers));  // passes may have added some
  traced.handles.resize(static_cast<size_t>(program.buffers));

  bindings_ = Bindings(program, traced, arguments, old_gradients);
  // Memory that the program keeps for itself is not that of the trace.
  auto kept = program.external_buffers();
  for (const auto& output : program.outputs)
    if (output.value != kNone && output.kind != Output::Kind::Return)
      kept[static_cast<size_t>(program.buffer_of(output.value))] = 1;
  for (size_t b = 0; b < kept.size(); b++)
    if (!kept[b]) traced.storages[b] = c10::Storage();
  executable_ = std::make_unique<Executable>(std::move(program), traced.storages, options.run_with);
  record.finish(*executable_);
  find_gradients();
  put_back();
  return Traced::Done;
}

// A pass may have made a gradient lie elsewhere than it did when it was traced: in a bucket, say.
void CompiledProgram::find_gradients() {
  size_t next = 0;
  for (const auto& output : executable_->program().outputs) {
    if (output.kind != Output::Kind::Gradient) continue;
    auto& gradient = gradients_[next++].gradient;
    auto now = executable_->output(output);
    if (now.is_alias_of(plain_of(gradient))) continue;
    gradients_[next - 1].holders = 0;
    gradient =
        is_dtensor(gradient) ? tessera::detail::wrap(std::move(now), tessera::detail::meta_of(gradient).spec) : now;
  }
}

// Somebody beside us and the parameter has a gradient of before, or a part of it: it stays theirs.
void CompiledProgram::give_up_held_gradients() {
  const auto is_held = [](const Gradient& each) {
    const auto& plain = plain_of(each.gradient);
    const bool distributed = !plain.is_same(each.gradient);
    return each.holders > 0 && (each.gradient.use_count() > 2 || (distributed && plain.use_count() > 1) ||
                                plain.storage().use_count() > each.holders);
  };
  if (std::none_of(gradients_.begin(), gradients_.end(), is_held)) return;
  size_t next = 0;
  const auto& program = executable_->program();
  for (const auto& output : program.outputs)
    if (output.kind == Output::Kind::Gradient && is_held(gradients_[next++]))
      executable_->give_new_memory(program.buffer_of(output.value));
  find_gradients();
}

bool CompiledProgram::fits(const Arguments& arguments, const Signature& signature) const {
  if (!(signature == signature_)) return false;
  for (const auto& guard : guards_)
    if (!guard.holds()) return false;
  for (const auto& slot : slots_)
    if (!is_like(slot.parameter.grad(), slot.gradient)) return false;
  return bindings_.fits(arguments);
}

Tensors CompiledProgram::run(const Arguments& arguments) {
  bindings_.bind(*executable_, arguments);
  give_up_held_gradients();
  executable_->run();
  advance_stream(draws_);
  for (auto& each : gradients_) {
    if (!each.parameter.grad().is_same(each.gradient)) each.parameter.mutable_grad() = each.gradient;
    if (each.holders == 0) each.holders = plain_of(each.gradient).storage().use_count();
  }
  for (const auto& each : outside_) each.parameter.mutable_grad() = each.gradient;
  for (const auto& parameter : without_gradient_) parameter.mutable_grad().reset();
  for (const auto& effect : effects_) effect();
  Tensors returned;
  size_t next = 0;
  const auto& outputs = executable_->program().outputs;
  for (const auto& output : outputs) {
    if (output.kind != Output::Kind::Return) continue;
    auto tensor = executable_->output(output);
    if (tensor.defined() && returned_[next]) tensor = tessera::detail::wrap(std::move(tensor), returned_[next]);
    returned.push_back(std::move(tensor));
    next++;
  }
  return returned;
}

Tensors StepCache::call(Arguments arguments, const std::function<Tensors()>& step) {
  if (options_.backend == "eager") return step();
  for (const auto& t :
       arguments.tensors)  // their gradients are memory that the program keeps: another leaf has another
    if (t.defined() && t.is_leaf() && t.requires_grad()) arguments.leaves.push_back(t);
  if (options_.parallel_mode) check(*options_.parallel_mode, arguments);
  const auto signature = signature_of(arguments);
  for (size_t i = 0; i < programs_.size(); i++)
    if (programs_[i]->fits(arguments, signature)) {
      std::rotate(programs_.begin(), programs_.begin() + static_cast<ptrdiff_t>(i),
                  programs_.begin() + static_cast<ptrdiff_t>(i) + 1);
      return programs_[0]->run(arguments);
    }
  if (!programs_.empty())
    warn_once(c10::str("compile/", static_cast<const void*>(this)),
              c10::str("compile: the step is compiled again, because ", signature.difference(programs_[0]->signature()),
                       "; this is said once, and at most ", options_.cache_size, " programs are kept"));
  if (options_.parallel_mode && (partitioned_.empty() || partitioned_[0] != arguments.modules.at(0))) {
    partition(*options_.parallel_mode, arguments);
    partitioned_.assign(1, arguments.modules[0]);
  }
  if (std::find(eager_.begin(), eager_.end(), signature) != eager_.end()) return step();
  std::unique_ptr<CompiledProgram> program;
  try {
    program = std::make_unique<CompiledProgram>(arguments, step, options_);
  } catch (const UsageError& error) {
    if (options_.fullgraph || options_.parallel_mode) throw;
    warn_once(c10::str("compile/", static_cast<const void*>(this), "/eager"),
              c10::str("the step runs as it is: ", error.what_without_backtrace()));
    eager_.push_back(signature);
    return step();
  }
  idle_.look_at(program->report(), options_);
  if (programs_.size() >= options_.cache_size) programs_.pop_back();
  programs_.insert(programs_.begin(), std::move(program));
  return programs_[0]->run(arguments);
}

const CompiledProgram& StepCache::last() const {
  TESSERA_CHECK(!programs_.empty(), UsageError, "compile: no step has run yet; call it once");
  return *programs_[0];
}

}  // namespace tessera::compiler
