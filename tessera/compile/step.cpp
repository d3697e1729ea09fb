#include "tessera/compile/step.h"

#include "tessera/base/compiling.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/compile/agree.h"
#include "tessera/compile/lower.h"
#include "tessera/compile/plain.h"
#include "tessera/compile/streams.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  return !a.defined() ||
         (plain_of(a).storage().unsafeGetStorageImpl() == plain_of(b).storage().unsafeGetStorageImpl() &&
          plain_of(a).storage_offset() == plain_of(b).storage_offset());
}

}  // namespace

CompiledProgram::CompiledProgram(const Arguments& arguments, const std::function<Tensors()>& step,
                                 const Settings& options, bool keeps_gradients)
    : signature_(signature_of(arguments)) {
  const auto of = keeps_gradients ? CompilingScope::Of::Part : CompilingScope::Of::Step;
  if (!keeps_gradients && trace(arguments, step, options, of, true)) return;
  trace(arguments, step, options, of, false);
}

// Gradients that are not there get stand-ins at first. If the step never looks at a gradient of before, because it sets
// them to none itself, one program serves whether they are there or not; else (false) it is traced as things are.
bool CompiledProgram::trace(const Arguments& arguments, const std::function<Tensors()>& step, const Settings& options,
                            CompilingScope::Of of, bool with_stand_ins) {
  auto lifted = lift(arguments);
  struct Before {
    at::Tensor parameter, gradient, stand_in;
    std::string name;
  };
  std::vector<Before> before;
  bool missing = false;
  for (size_t i = 0, n = lifted.size(); i < n; i++) {
    if (lifted[i].role != Role::Parameter || !lifted[i].handle.requires_grad()) continue;
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
    compiling.finish();
  } catch (...) {
    tracer.restore();
    put_back();
    throw;
  }
  draws_ = streams.draws();
  guards_.clear();
  for (auto& guard : CompilingScope::take_guards()) {
    const auto now = guard();
    guards_.emplace_back(std::move(guard), now);
  }
  effects_ = CompilingScope::take_effects();

  bool depends = missing && !with_stand_ins;
  for (const auto& each : before) {
    const auto& old = each.stand_in.defined() ? each.stand_in : each.gradient;
    depends |= old.defined() && tracer.was_used(plain_of(old));
  }
  if (depends && missing && with_stand_ins) {
    tracer.restore();
    put_back();
    return false;
  }
  gradients_.clear();
  slots_.clear();
  for (auto& each : before) {
    if (depends) slots_.push_back({each.parameter, each.gradient});
    const auto& now = each.parameter.grad();
    if (now.defined() && tracer.made(plain_of(now))) {
      tracer.put_out(plain_of(now), Output::Kind::Gradient, each.name);
      gradients_.push_back({each.parameter, now});
    } else if (!now.defined()) {
      gradients_.push_back({each.parameter, {}});
    } else if (each.stand_in.defined()) {
      each.parameter.mutable_grad().reset();  // nobody touched it
    }
  }
  tracer.restore();

  auto traced = tracer.finish();
  auto& program = traced.program;
  if (options.parallel_mode)
    for (const auto& input : program.inputs) {
      const auto& handle = traced.handles[static_cast<size_t>(program.buffer_of(input.value))];
      TESSERA_CHECK(input.role != Role::Captured || !handle.requires_grad(), UsageError,
                    "compile: the step uses a parameter of shape ", handle.sizes(),
                    " that is not one of its arguments' (a lambda that captures its model?); under DataParallel the "
                    "model must be an argument, or its parameters would stay as they are on every rank");
    }
  TESSERA_CHECK(!program.nodes.empty(), UsageError,
                "compile: the step did nothing with tensors; there is nothing to compile");
  report_ = run_passes(program, options.passes, options.verified);
  lower(program, options);
  agree_on(program);
  traced.storages.resize(static_cast<size_t>(program.buffers));  // passes may have added some
  traced.handles.resize(static_cast<size_t>(program.buffers));

  bindings_ = Bindings(program, traced, arguments);
  // Memory that the program keeps for itself is not that of the trace.
  auto kept = program.external_buffers();
  for (const auto& output : program.outputs)
    if (output.value != kNone && output.kind != Output::Kind::Return)
      kept[static_cast<size_t>(program.buffer_of(output.value))] = 1;
  for (size_t b = 0; b < kept.size(); b++)
    if (!kept[b]) traced.storages[b] = c10::Storage();
  executable_ = std::make_unique<Executable>(std::move(program), traced.storages);
  return true;
}

bool CompiledProgram::fits(const Arguments&, const Signature& signature) const {
  if (!(signature == signature_)) return false;
  for (const auto& [guard, then] : guards_)
    if (guard() != then) return false;
  return std::all_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return same_memory(slot.parameter.grad(), slot.gradient); });
}

Tensors CompiledProgram::run(const Arguments& arguments) {
  bindings_.bind(*executable_, arguments);
  executable_->run();
  advance_stream(draws_);
  for (auto& each : gradients_)
    if (!each.parameter.grad().is_same(each.gradient)) each.parameter.mutable_grad() = each.gradient;
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

Tensors StepCache::call(const Arguments& arguments, const std::function<Tensors()>& step) {
  if (options_.backend == "eager") return step();
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
  if (programs_.size() >= options_.cache_size) programs_.pop_back();
  programs_.insert(programs_.begin(), std::move(program));
  return programs_[0]->run(arguments);
}

const CompiledProgram& StepCache::last() const {
  TESSERA_CHECK(!programs_.empty(), UsageError, "compile: no step has run yet; call it once");
  return *programs_[0];
}

}  // namespace tessera::compiler
