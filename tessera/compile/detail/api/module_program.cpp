#include "tessera/compile/detail/api/module_program.h"

#include "tessera/base/detail/libtorch_autograd_compat.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/api/build_executable.h"
#include "tessera/compile/detail/backward/compiled_node.h"
#include "tessera/compile/detail/trace/local_tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

// Activation checkpointing draws again in backward, from the stream at the time of the forward. The backward program
// would read the stream at its own time.
void check_draws_of_backward(const Program& backward) {
  for (const auto& node : backward.nodes)
    for (const auto& arg : node.args)
      TESSERA_CHECK(
          !std::holds_alternative<RuntimeScalar>(arg) || !node.op.operator_name().name.starts_with("tessera::philox_"),
          UsageError,
          "compile: the backward of this module draws from Tessera's random stream (activation checkpointing "
          "with dropout), which a compiled module cannot do; compile the train step instead");
}

}  // namespace

ModuleProgram::ModuleProgram(const CallArguments& arguments, const TracedFunction& forward, const Settings& settings) {
  TraceRun run(lift(arguments));
  auto recorded = record(run, arguments, forward);
  run.check_inputs_have_their_shapes();
  stream_ = run.random().advance();
  guards_ = CompilingScope::take_guards();
  run.restore_memory();
  auto traced = run.tracer().finish();
  std::erase_if(traced.program.outputs, [](const Output& output) { return output.kind == Output::Kind::Kept; });

  auto split = split_forward_backward(traced.program, recorded.forward_nodes, returned_specs_.size());
  check_draws_of_backward(split.second);
  bindings_ = InputBindings(split.first, traced, arguments);
  if (!recorded.output_gradients.empty()) build_backward(std::move(recorded), split, traced, arguments, settings);
  executable_ = build_executable(std::move(split.first), "forward", settings, report_,
                                 [&](const Program& program) { return shared_storages(program, traced.storages); });
  signature_ = Signature(arguments, std::vector<bool>(arguments.numbers.size(), true));
}

// Runs forward, and the backward of its results, under the tracer.
ModuleProgram::Recorded ModuleProgram::record(TraceRun& run, const CallArguments& arguments,
                                              const TracedFunction& forward) {
  auto& tracer = run.tracer();
  CompilingScope::take_guards();  // of an earlier trace that failed
  const CompilingScope compiling;
  const OpModeScope recording(tracer);
  Recorded recorded;
  const auto outputs = run.call([&] { return forward(nullptr); });
  Tensors roots, root_gradients;
  for (const auto& t : outputs) {
    const auto local = t.defined() ? local_or_self(t) : at::Tensor();
    returned_specs_.push_back(spec_or_null(t));
    requires_grad_.push_back(t.defined() && t.requires_grad());
    tracer.add_output(local, Output::Kind::Return, "");
    if (!requires_grad_.back()) continue;
    const OpModesOff off;
    auto gradient = at::zeros_like(local, at::MemoryFormat::Contiguous);
    tracer.add_input(gradient, Role::Gradient, c10::str("output ", returned_specs_.size() - 1));
    recorded.output_gradients.push_back(gradient);
    recorded.backward.gradient_specs.push_back(returned_specs_.back());
    recorded.backward.gradient_types.push_back(Type::of(gradient));
    roots.push_back(t);
    root_gradients.push_back(wrap_with_spec(gradient, returned_specs_.back()));
  }
  recorded.forward_nodes = tracer.nodes();
  if (!roots.empty()) record_backward(tracer, arguments, roots, root_gradients, recorded.backward);
  return recorded;
}

void ModuleProgram::record_backward(Tracer& tracer, const CallArguments& arguments, const Tensors& roots,
                                    const Tensors& root_gradients, BackwardProgram& backward) {
  for (const auto* module : arguments.modules)
    for (const auto& p : module->parameters())
      if (p.requires_grad()) differentiated_parameters_.push_back(p);
  auto inputs = differentiated_parameters_;
  for (size_t a = 0; a < arguments.tensors.size(); a++)
    if (arguments.tensors[a].defined() && arguments.tensors[a].requires_grad()) {
      differentiated_arguments_.push_back(a);
      inputs.push_back(arguments.tensors[a]);
    }
  for (const auto& gradient : torch::autograd::grad(roots, inputs, root_gradients, false, false, true)) {
    backward.result_specs.push_back(spec_or_null(gradient));
    tracer.add_output(gradient.defined() ? local_or_self(gradient) : at::Tensor(), Output::Kind::Return, "");
  }
}

void ModuleProgram::build_backward(Recorded recorded, SplitProgram& split, const Tracer::Result& traced,
                                   const CallArguments& arguments, const Settings& settings) {
  auto backward = std::make_shared<BackwardProgram>(std::move(recorded.backward));
  const auto external = traced.program.external_buffers();
  backward_bindings_ = InputBindings(traced.program, traced, arguments);
  backward->saved_buffers = split.saved;
  backward->saved_offsets.assign(split.saved.size(), 0);
  backward->saved_by_forward = split.saved.size();
  for (const auto& input : split.second.inputs) {
    const auto buffer = split.second.buffer_of(input.value);
    auto& saved = backward->saved_buffers;
    if (!external[static_cast<size_t>(buffer)] || input.role == Role::Gradient ||
        std::find(saved.begin(), saved.end(), buffer) != saved.end())
      continue;
    saved_inputs_.push_back(buffer);
    saved.push_back(buffer);
    backward->saved_offsets.push_back(local_or_self(backward_bindings_.tensor_of(buffer, arguments)).storage_offset());
  }
  for (const auto& gradient : recorded.output_gradients)
    for (size_t b = 0; b < external.size(); b++)
      if (traced.storages[b].unsafeGetStorageImpl() == gradient.storage().unsafeGetStorageImpl())
        backward->gradient_buffers.push_back(static_cast<int32_t>(b));
  backward->result_order = outputs_by_node(split.second);
  backward->executable = build_executable(
      std::move(split.second), "backward", settings, report_,
      [&](const Program& program) { return shared_storages(program, traced.storages); }, &backward->before_lowering);
  backward_ = std::move(backward);
}

bool ModuleProgram::fits(const CallArguments& arguments, const ThreadState& now, std::string* why) const {
  const auto fails = [&](const char* reason) {
    if (why) *why = reason;
    return false;
  };
  if (!signature_.holds(arguments, now, why)) return false;
  if (!std::all_of(guards_.begin(), guards_.end(), [](const auto& guard) { return guard.holds(); }))
    return fails("the state of FSDP or DDP, or a ts::live() value has changed");
  if (!bindings_.fits(arguments) || (backward_ && !backward_bindings_.fits(arguments)))
    return fails("an argument shares memory with a parameter, or no longer does");
  return true;
}

std::string ModuleProgram::why_not(const CallArguments& arguments, const ThreadState& now) const {
  std::string why;
  fits(arguments, now, &why);
  return why;
}

std::function<void()> ModuleProgram::save_before_run(const CallArguments& arguments) const {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> memory;
  const auto& program = executable_->program();
  const auto external = program.external_buffers();
  for (const auto& node : program.nodes)
    node.each_write([&](ValueId id) {
      if (!external[static_cast<size_t>(program.buffer_of(id))]) return;
      const auto t = bindings_.tensor_of(program.buffer_of(id), arguments);
      if (t.defined()) memory.emplace_back(local_or_self(t).detach(), local_or_self(t).detach().clone());
    });
  return [memory, generator = at::detail::getDefaultCPUGenerator(),
          state = at::detail::getDefaultCPUGenerator().get_state(), stream = random::state()]() mutable {
    const at::NoGradGuard guard;
    for (auto& [tensor, before] : memory) tensor.copy_(before);
    generator.set_state(state);
    random::state() = stream;
  };
}

Tensors ModuleProgram::run(const CallArguments& arguments) {
  bindings_.bind(*executable_, arguments);
  executable_->run();
  stream_.apply();
  Tensors returned, saved;
  for (const auto& output : executable_->program().outputs) {
    auto tensor = executable_->output(output);
    if (returned.size() < returned_specs_.size())
      returned.push_back(wrap_with_spec(std::move(tensor), returned_specs_[returned.size()]));
    else
      saved.push_back(std::move(tensor));
  }
  if (backward_ && at::GradMode::is_enabled()) add_autograd_node(returned, std::move(saved), arguments);
  if (executable_->runs() == 1) signature_.exclude_changed_members();
  return returned;
}

// returned <- CompiledNode <- one DeliverNode per result <- the parameter or argument
void ModuleProgram::add_autograd_node(Tensors& returned, Tensors saved, const CallArguments& arguments) const {
  for (const auto buffer : saved_inputs_) saved.push_back(backward_bindings_.tensor_of(buffer, arguments));
  auto inputs = differentiated_parameters_;
  for (const auto a : differentiated_arguments_) inputs.push_back(arguments.tensors[a]);
  torch::autograd::edge_list edges;
  for (const auto& t : inputs) edges.push_back(torch::autograd::impl::gradient_edge(t));
  const auto& order = backward_->result_order;
  for (auto i = order.rbegin(); i != order.rend(); i++) {
    auto deliver = libtorch::make_node<DeliverNode>();
    deliver->add_input_metadata(inputs[*i]);
    deliver->add_next_edge(std::move(edges[*i]));
    edges[*i] = torch::autograd::Edge(std::move(deliver), 0);
  }
  auto node = libtorch::make_node<CompiledNode>(backward_);
  node->set_next_edges(std::move(edges));
  node->save(std::move(saved));
  for (size_t i = 0; i < returned.size(); i++)
    if (requires_grad_[i]) torch::autograd::set_history(returned[i], node);
}

CallResult ModuleCache::call(const CallArguments& arguments, const TracedFunction& forward) {
  const auto settings = settings_from(options_);
  if (settings.backend == "eager" || compiling()) return {forward(nullptr), nullptr};  // part of the outer program
  return programs_.call(arguments, settings, forward, {.what = "module", .fall_back = !settings.fullgraph});
}

}  // namespace tessera::compiler
