#include "tessera/compile/detail/api/compiled_module.h"

#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/base/error.h"
#include "tessera/base/detail/libtorch_autograd_compat.h"
#include "tessera/base/detail/warn_once.h"
#include "tessera/tracing/detail/tracer_key.h"
#include "tessera/compile/detail/ir/program_agreement.h"
#include "tessera/compile/detail/codegen/lower.h"
#include "tessera/compile/detail/trace/plain.h"
#include "tessera/compile/detail/ir/split_forward_backward.h"
#include "tessera/compile/detail/trace/random_streams.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

using torch::autograd::Edge;
using torch::autograd::variable_list;

SpecRef spec_of(const at::Tensor& t) {
  return t.defined() && is_dtensor(t) ? tessera::detail::meta_of(t).spec : SpecRef();
}
// Which output is there first, second, ...; without those that are not.
std::vector<size_t> order_of_outputs(const Program& program) {
  std::vector<size_t> made_by(program.values.size(), 0), order;
  for (size_t n = 0; n < program.nodes.size(); n++)
    program.nodes[n].each_result([&](ValueId id) { made_by[static_cast<size_t>(id)] = n; });
  for (size_t i = 0; i < program.outputs.size(); i++)
    if (program.outputs[i].value != kNone) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return made_by[static_cast<size_t>(program.outputs[a].value)] <
           made_by[static_cast<size_t>(program.outputs[b].value)];
  });
  return order;
}

at::Tensor wrapped(at::Tensor plain, const SpecRef& spec) {
  return plain.defined() && spec ? tessera::detail::wrap(std::move(plain), spec) : plain;
}

}  // namespace

CompiledForward::CompiledForward(const Arguments& arguments, const std::function<Tensors()>& forward,
                                 const CompileOptions& options)
    : signature_(signature_of(arguments)) {
  const auto settings = settings_from(options);
  CompilingScope::take_guards();
  const StreamsRestored streams;
  Tracer tracer(lift(arguments), streams.live_numbers());
  size_t cut = 0;
  std::vector<at::Tensor> gradients_in;
  auto backward = std::make_shared<BackwardProgram>();
  try {
    const CompilingScope compiling;
    const OpModeScope on(tracer);
    const auto outputs = forward();
    variable_list roots, flowing;
    for (const auto& t : outputs) {
      const auto plain = t.defined() ? plain_of(t) : at::Tensor();
      returned_.push_back(spec_of(t));
      requires_grad_.push_back(t.defined() && t.requires_grad());
      tracer.put_out(plain, Output::Kind::Return, "");
      if (!requires_grad_.back()) continue;
      const OpModesOff off;
      auto in = at::zeros_like(plain, at::MemoryFormat::Contiguous);
      tracer.add_input(in, Role::Gradient, c10::str("output ", returned_.size() - 1));
      gradients_in.push_back(in);
      backward->gradient_specs.push_back(returned_.back());
      backward->gradient_types.push_back(Type::of(in));
      roots.push_back(t);
      flowing.push_back(wrapped(in, returned_.back()));
    }
    outputs_ = outputs.size();
    cut = tracer.nodes();
    if (!roots.empty()) {
      for (const auto* module : arguments.modules)
        for (const auto& p : module->parameters())
          if (p.requires_grad()) differentiated_.push_back(p);
      variable_list inputs = differentiated_;
      for (size_t a = 0; a < arguments.tensors.size(); a++)
        if (arguments.tensors[a].defined() && arguments.tensors[a].requires_grad()) {
          arguments_.push_back(a);
          inputs.push_back(arguments.tensors[a]);
        }
      for (const auto& gradient : torch::autograd::grad(roots, inputs, flowing, false, false, true)) {
        backward->result_specs.push_back(spec_of(gradient));
        tracer.put_out(gradient.defined() ? plain_of(gradient) : at::Tensor(), Output::Kind::Return, "");
      }
    }
  } catch (...) {
    tracer.restore();
    throw;
  }
  draws_ = streams.draws();
  guards_ = CompilingScope::take_guards();
  tracer.restore();
  auto traced = tracer.finish();
  std::erase_if(traced.program.outputs, [](const Output& output) { return output.kind == Output::Kind::Kept; });
  auto halves = split_at(traced.program, cut, outputs_);
  bindings_ = Bindings(halves.first, traced, arguments);
  const auto external = traced.program.external_buffers();
  const auto bound = [&](const Program& half) {
    std::vector<c10::Storage> storages(external.size());
    for (const auto& input : half.inputs) {
      const auto b = static_cast<size_t>(half.buffer_of(input.value));
      storages[b] = traced.storages[b];
    }
    return storages;
  };
  const auto note = [&](std::vector<PassReport> report) {
    report_.insert(report_.end(), std::make_move_iterator(report.begin()), std::make_move_iterator(report.end()));
  };
  if (!gradients_in.empty()) {
    // What backward needs: memory of forward, of parameters and arguments, and the gradients that flow in.
    backward->saved = halves.saved;
    backward->offsets.assign(halves.saved.size(), 0);
    backward->own = halves.saved.size();
    const Bindings all(traced.program, traced, arguments);
    for (const auto& input : halves.second.inputs) {
      const auto buffer = halves.second.buffer_of(input.value);
      if (!external[static_cast<size_t>(buffer)] || input.role == Role::Gradient ||
          std::find(backward->saved.begin(), backward->saved.end(), buffer) != backward->saved.end())
        continue;
      saved_external_.push_back(buffer);
      backward->saved.push_back(buffer);
      backward->offsets.push_back(plain_of(all.tensor_of(buffer, arguments)).storage_offset());
    }
    for (const auto& in : gradients_in)
      for (size_t b = 0; b < external.size(); b++)
        if (traced.storages[b].unsafeGetStorageImpl() == in.storage().unsafeGetStorageImpl())
          backward->gradients.push_back(static_cast<int32_t>(b));
    backward_bindings_ = all;
    backward->order = order_of_outputs(halves.second);
    TraceRecorder record(settings.trace, "backward", halves.second);
    note(run_passes(halves.second, settings.passes, settings.verified));
    backward->seen = halves.second;
    note(lower(halves.second, settings));
    agree_on(halves.second);
    const auto storages = bound(halves.second);
    backward->executable = std::make_unique<Executable>(std::move(halves.second), storages, settings.run_with);
    record.finish(*backward->executable);
    backward_ = std::move(backward);
  }
  TraceRecorder record(settings.trace, "forward", halves.first);
  note(run_passes(halves.first, settings.passes, settings.verified));
  note(lower(halves.first, settings));
  agree_on(halves.first);
  const auto storages = bound(halves.first);
  executable_ = std::make_unique<Executable>(std::move(halves.first), storages, settings.run_with);
  record.finish(*executable_);
}

bool CompiledForward::fits(const Signature& signature) const {
  return signature == signature_ &&
         std::all_of(guards_.begin(), guards_.end(), [](const auto& guard) { return guard.holds(); });
}

Tensors CompiledForward::run(const Arguments& arguments) {
  bindings_.bind(*executable_, arguments);
  executable_->run();
  advance_stream(draws_);
  const auto& outputs = executable_->program().outputs;
  Tensors returned, saved;
  for (size_t i = 0; i < outputs.size(); i++) {
    auto tensor = executable_->output(outputs[i]);
    if (i < outputs_)
      returned.push_back(wrapped(std::move(tensor), returned_[i]));
    else
      saved.push_back(std::move(tensor));
  }
  if (!backward_ || !at::GradMode::is_enabled()) return returned;
  for (const auto buffer : saved_external_) saved.push_back(backward_bindings_.tensor_of(buffer, arguments));
  torch::autograd::edge_list edges;
  for (const auto& p : differentiated_) edges.push_back(torch::autograd::impl::gradient_edge(p));
  for (const auto a : arguments_) edges.push_back(torch::autograd::impl::gradient_edge(arguments.tensors[a]));
  // Of nodes that are ready autograd runs the youngest first: so gradients reach parameters, and hooks on them, in the
  // order they would have without compilation.
  for (auto i = backward_->order.rbegin(); i != backward_->order.rend(); i++) {
    auto deliver = libtorch::make_node<DeliverNode>();
    deliver->add_input_metadata(
        *i < differentiated_.size() ? differentiated_[*i] : arguments.tensors[arguments_[*i - differentiated_.size()]]);
    deliver->add_next_edge(std::move(edges[*i]));
    edges[*i] = Edge(std::move(deliver), 0);
  }
  auto node = libtorch::make_node<CompiledNode>(backward_);
  node->set_next_edges(std::move(edges));
  node->save(std::move(saved));
  for (size_t i = 0; i < returned.size(); i++)
    if (requires_grad_[i]) torch::autograd::set_history(returned[i], node);
  return returned;
}

Tensors BackwardProgram::run(const Tensors& kept, Tensors flowing) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < flowing.size(); i++) {
    auto& gradient = flowing[i];
    if (!gradient.defined()) {
      gradient = at::zeros(gradient_types[i].sizes, at::TensorOptions(gradient_types[i].dtype));
    } else if (gradient_specs[i]) {
      const auto& spec = *gradient_specs[i];
      gradient = plain_of(DTensor(gradient).redistribute(spec.mesh, spec.placements));
    }
    gradient = gradient.contiguous();
  }
  if (tracing()) {  // somebody wants to see what it does
    const auto& program = seen;
    Tensors inputs;
    for (const auto& input : program.inputs) {
      if (input.constant.defined()) {
        inputs.push_back(input.constant);
        continue;
      }
      const auto buffer = program.buffer_of(input.value);
      at::Tensor base;
      int64_t shift = 0;
      for (size_t i = 0; i < saved.size(); i++)
        if (saved[i] == buffer) {
          base = plain_of(kept[i]);
          shift = saved_is_external(i) ? base.storage_offset() - offsets[i] : 0;
        }
      for (size_t i = 0; i < gradients.size(); i++)
        if (gradients[i] == buffer) base = flowing[i];
      const auto& value = program[input.value];
      inputs.push_back(base.as_strided(value.type.sizes, value.type.strides, value.offset + shift));
    }
    auto results = interpret(program, inputs);
    for (size_t i = 0; i < results.size(); i++) results[i] = wrapped(std::move(results[i]), result_specs[i]);
    return results;
  }
  for (size_t i = 0; i < saved.size(); i++) {
    const auto& base = plain_of(kept[i]);
    executable->bind(saved[i], base.storage(), saved_is_external(i) ? base.storage_offset() - offsets[i] : 0);
  }
  for (size_t i = 0; i < gradients.size(); i++)
    executable->bind(gradients[i], flowing[i].storage(), flowing[i].storage_offset());
  executable->run();
  const auto& program = executable->program();
  Tensors results;
  for (size_t i = 0; i < program.outputs.size(); i++)
    results.push_back(wrapped(executable->output(program.outputs[i]), result_specs[i]));
  return results;
}

variable_list CompiledNode::apply(variable_list&& gradients) {
  TESSERA_CHECK(!saved_.empty() || program_->saved.empty(), UsageError,
                "backward through a compiled module a second time, after what it had saved was let go of; pass "
                "retain_graph to the first");
  for (size_t i = 0; i < saved_.size(); i++)
    TESSERA_CHECK(saved_[i]._version() == versions_[i], UsageError, "a tensor of shape ", saved_[i].sizes(),
                  " that the backward of a compiled module needs was written to since its forward");
  return program_->run(saved_, std::move(gradients));
}

Tensors ModuleCache::call(const Arguments& arguments, const std::function<Tensors()>& forward) {
  const auto settings = settings_from(options_);
  if (settings.backend == "eager") return forward();
  const auto signature = signature_of(arguments);
  for (size_t i = 0; i < programs_.size(); i++)
    if (programs_[i]->fits(signature)) {
      std::rotate(programs_.begin(), programs_.begin() + static_cast<ptrdiff_t>(i),
                  programs_.begin() + static_cast<ptrdiff_t>(i) + 1);
      return programs_[0]->run(arguments);
    }
  if (std::find(eager_.begin(), eager_.end(), signature) != eager_.end()) return forward();
  std::unique_ptr<CompiledForward> program;
  try {
    program = std::make_unique<CompiledForward>(arguments, forward, options_);
  } catch (const UsageError& error) {
    if (settings.fullgraph) throw;
    warn_once(c10::str("compile/", static_cast<const void*>(this), "/eager"),
              c10::str("the module runs as it is: ", error.what_without_backtrace()));
    eager_.push_back(signature);
    return forward();
  }
  idle_.look_at(program->report(), settings);
  if (programs_.size() >= settings.cache_size) programs_.pop_back();
  programs_.insert(programs_.begin(), std::move(program));
  return programs_[0]->run(arguments);
}

}  // namespace tessera::compiler
