#include "tessera/compile/detail/api/module_program.h"

#include "tessera/base/detail/libtorch_autograd_compat.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/api/build_executable.h"
#include "tessera/compile/detail/backward/compiled_node.h"
#include "tessera/compile/detail/ir/split_by_outputs.h"
#include "tessera/compile/detail/trace/local_tensors.h"
#include "tessera/numerics/detail/innermost_scope.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

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

// A tensor that forward stores in a member would be the one of the trace forever.
void refuse_kept_tensors(Program& program) {
  for (const auto& output : program.outputs)
    TESSERA_CHECK(output.kind != Output::Kind::Kept, UsageError,
                  "compile: the forward of the module keeps a tensor of shape ",
                  at::IntArrayRef(program[output.value].type.sizes),
                  " in a variable, for example a member, which a compiled module cannot update; return it, or copy it "
                  "into a buffer with copy_()");
}

}  // namespace

ModuleProgram::ModuleProgram(const CallArguments& arguments, const TracedFunction& forward, const Settings& settings) {
  compile(arguments, forward, settings, CompilingScope::Region::Part, true);
}

// Runs forward, and the backward of its results, under the tracer.
void ModuleProgram::record(TraceRun& run, const CallArguments& arguments, TraceRequest& request) {
  auto& tracer = run.tracer();
  CompilingScope compiling;
  const OpModeScope recording(tracer);
  const numerics::InnermostScope numerics;
  recorded_ = {};
  returned_.clear();
  const auto outputs = call_function(run, request);
  Tensors roots, root_gradients;
  for (const auto& t : outputs) {
    const auto local = t.defined() ? local_or_self(t) : at::Tensor();
    returned_.add(t);
    tracer.add_output(local, Output::Kind::Return, "");
    if (!returned_.requires_grad(returned_.size() - 1)) continue;
    const OpModesOff off;
    auto gradient = at::zeros_like(local, at::MemoryFormat::Contiguous);
    tracer.add_input(gradient, Role::Gradient, c10::str("output ", returned_.size() - 1));
    recorded_.output_gradients.push_back(gradient);
    recorded_.gradient_specs.push_back(spec_or_null(t));
    recorded_.gradient_types.push_back(Type::of(gradient));
    roots.push_back(t);
    root_gradients.push_back(wrap_with_spec(gradient, spec_or_null(t)));
  }
  recorded_.forward_nodes = tracer.nodes();
  if (!roots.empty()) record_backward(tracer, arguments, roots, root_gradients);
  compiling.finish();
  run.check_inputs_have_their_shapes();
}

void ModuleProgram::record_backward(Tracer& tracer, const CallArguments& arguments, const Tensors& roots,
                                    const Tensors& root_gradients) {
  for (const auto* module : arguments.modules)
    for (const auto& p : module->parameters())
      if (p.requires_grad()) recorded_.differentiated_parameters.push_back(p);
  for (const auto& leaf : arguments.leaves) recorded_.differentiated_parameters.push_back(leaf);
  for (size_t a = 0; a < arguments.tensors.size(); a++)
    if (arguments.tensors[a].defined() && arguments.tensors[a].requires_grad())
      recorded_.differentiated_arguments.push_back(a);
  const auto inputs = differentiated(arguments);
  if (inputs.empty()) {  // captured leaves are found after this trace
    recorded_.output_gradients.clear();
    return;
  }
  for (const auto& gradient : torch::autograd::grad(roots, inputs, root_gradients, false, false, true)) {
    recorded_.result_specs.push_back(spec_or_null(gradient));
    tracer.add_output(gradient.defined() ? local_or_self(gradient) : at::Tensor(), Output::Kind::Return, "");
  }
}

// The tensors whose gradients backward computes, in order.
Tensors ModuleProgram::differentiated(const CallArguments& arguments) const {
  auto inputs = recorded_.differentiated_parameters;
  for (const auto a : recorded_.differentiated_arguments) inputs.push_back(arguments.tensors[a]);
  return inputs;
}

void ModuleProgram::build(Tracer::Result traced, const TraceRun& /*run*/, const CallArguments& arguments,
                          const Settings& given) {
  auto settings = given;
  settings.widens_bfloat16 = false;
  refuse_kept_tensors(traced.program);
  auto split = split_forward_backward(traced.program, recorded_.forward_nodes, returned_.size());
  returned_.find_bases(arguments, traced);
  check_draws_of_backward(split.second);
  bindings_ = InputBindings(split.first, traced, arguments);
  if (!recorded_.output_gradients.empty()) build_backward(split, traced, arguments, settings);
  recorded_.output_gradients.clear();
  executable_ = build_executable(std::move(split.first), "forward", settings, report_,
                                 [&](const Program& program) { return shared_storages(program, traced.storages); });
  find_written_buffers(executable_->program());
}

void ModuleProgram::build_backward(SplitProgram& split, const Tracer::Result& traced, const CallArguments& arguments,
                                   const Settings& settings) {
  auto backward = std::make_shared<BackwardProgram>();
  backward->gradient_specs = recorded_.gradient_specs;
  backward->gradient_types = recorded_.gradient_types;
  backward->result_specs = recorded_.result_specs;
  backward->numbers = number_values_;
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
  for (const auto& gradient : recorded_.output_gradients)
    for (size_t b = 0; b < external.size(); b++)
      if (traced.storages[b].unsafeGetStorageImpl() == gradient.storage().unsafeGetStorageImpl())
        backward->gradient_buffers.push_back(static_cast<int32_t>(b));
  backward->result_order = outputs_by_node(split.second);
  auto rest = split_off_weights(split.second, *backward, settings);
  const auto build = [&](BackwardProgram& of, Program program, const char* name) {
    of.executable = build_executable(
        std::move(program), name, settings, report_,
        [&](const Program& lowered) { return shared_storages(lowered, traced.storages); }, &of.before_lowering);
  };
  build(*backward, std::move(split.second), "backward");
  if (backward->weights) build(*backward->weights, std::move(rest), "backward_weights");
  backward_ = std::move(backward);
}

// With split_backward: `program` becomes the part for the arguments. Returns the part for the parameters.
Program ModuleProgram::split_off_weights(Program& program, BackwardProgram& backward, const Settings& settings) const {
  const auto parameters = recorded_.differentiated_parameters.size();
  if (!settings.split_backward || parameters == 0 || recorded_.differentiated_arguments.empty()) return {};
  std::vector<char> of_argument(program.outputs.size(), 0);
  std::fill(of_argument.begin() + static_cast<ptrdiff_t>(parameters), of_argument.end(), 1);
  auto parts = split_by_outputs(std::move(program), of_argument);
  auto weights = std::make_shared<BackwardProgram>();
  weights->gradient_buffers = backward.gradient_buffers;
  weights->gradient_types = backward.gradient_types;
  weights->gradient_specs = backward.gradient_specs;
  weights->saved_buffers = parts.saved;
  weights->saved_offsets.assign(parts.saved.size(), 0);
  weights->saved_by_forward = parts.saved.size() + backward.saved_by_forward;
  const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  append(weights->saved_buffers, backward.saved_buffers);
  append(weights->saved_offsets, backward.saved_offsets);
  const auto boundary = backward.result_specs.begin() + static_cast<ptrdiff_t>(parameters);
  weights->result_specs.assign(backward.result_specs.begin(), boundary);
  backward.result_specs.erase(backward.result_specs.begin(), boundary);
  backward.result_specs.resize(backward.result_specs.size() + parts.saved.size());
  backward.weights = std::move(weights);
  program = std::move(parts.first);
  return std::move(parts.second);
}

std::function<void()> ModuleProgram::keep_collected() {
  return [this, kept = recorded_, others = TracedProgram::keep_collected()] {
    recorded_ = kept;
    others();
  };
}

bool ModuleProgram::more_guards_hold(const CallArguments& arguments, std::string* why) const {
  if (!backward_ || backward_bindings_.fits(arguments)) return true;
  if (why) *why = "an argument shares memory with a parameter, or no longer does";
  return false;
}

Returned ModuleProgram::run(const CallArguments& arguments) {
  set_numbers(arguments);
  bindings_.bind(*executable_, arguments);
  executable_->run();
  stream_.apply();
  Tensors returned, saved;
  const bool has_graph = backward_ && at::GradMode::is_enabled();
  for (const auto& output : executable_->program().outputs) {
    if (returned.size() < returned_.size())
      returned.push_back(returned_.next(*executable_, output, arguments, returned, has_graph));
    else
      saved.push_back(executable_->output(output));
  }
  if (has_graph) add_autograd_node(returned, std::move(saved), arguments);
  for (const auto& repeat : on_replay_) repeat();
  if (executable_->runs() == 1) exclude_changed_members();
  return {std::move(returned), returned_numbers()};
}

// returned <- CompiledNode <- one DeliverNode per result <- the parameter or argument
void ModuleProgram::add_autograd_node(Tensors& returned, Tensors saved, const CallArguments& arguments) const {
  // A write into a result changes the saved tensor with the same memory.
  for (const auto& t : saved)
    for (const auto& result : returned)
      if (result.defined() && t.is_alias_of(local_or_self(result)))
        torch::autograd::impl::set_version_counter(t, torch::autograd::impl::version_counter(result));
  for (const auto buffer : saved_inputs_) saved.push_back(backward_bindings_.tensor_of(buffer, arguments));
  const auto inputs = differentiated(arguments);
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
  node->save(std::move(saved), *number_values_);
  for (size_t i = 0; i < returned.size(); i++)
    if (returned_.requires_grad(i)) torch::autograd::set_history(returned[i], node);
}

// Results, written memory, and the gradients for a gradient of ones.
TracedProgram::CheckedTensors ModuleProgram::checked_tensors(const CallArguments& arguments, const Tensors& returned,
                                                             bool /*exact*/) const {
  CheckedTensors all;
  const auto add = [&](std::string name, const at::Tensor& t) {
    const at::NoGradGuard no_grad;
    all.push_back({std::move(name), t.defined() ? local_or_self(t).detach().clone() : at::Tensor()});
  };
  for (size_t i = 0; i < returned.size(); i++) add(c10::str("result ", i), returned[i]);
  for (auto& each : written_memory(arguments)) all.push_back(std::move(each));
  if (!backward_ || !at::GradMode::is_enabled()) return all;
  Tensors roots, gradients;
  for (size_t i = 0; i < returned.size(); i++)
    if (returned_.requires_grad(i) && returned[i].requires_grad()) {
      roots.push_back(returned[i]);
      gradients.push_back(at::ones_like(returned[i]));
    }
  const auto inputs = differentiated(arguments);
  if (roots.empty() || inputs.empty()) return all;
  const auto computed = torch::autograd::grad(roots, inputs, gradients, true, false, true);
  for (size_t i = 0; i < computed.size(); i++)
    add(c10::str("gradient ", i), computed[i].defined() ? computed[i] : at::zeros_like(inputs[i]));
  return all;
}

// First forward itself, then the program, both from the state before. The call leaves what the program leaves.
Returned ModuleProgram::run_beside_eager(const CallArguments& arguments, const TracedFunction& function, bool exact) {
  auto before = save_before_run(arguments);
  try {
    CheckedTensors wanted;
    {
      const auto eager = function(nullptr);
      wanted = checked_tensors(arguments, eager.tensors, exact);
    }
    before.restore();
    auto returned = run(arguments);
    const auto numbers = *number_values_;
    auto state = save_before_run(arguments);  // backward can draw
    const auto found = checked_tensors(arguments, returned.tensors, exact);
    state.restore();
    *number_values_ = numbers;
    compare_with_eager(found, wanted, exact, "The state is the one before the call.");
    return returned;
  } catch (...) {
    before.restore();
    throw;
  }
}

CallResult ModuleCache::call(const CallArguments& arguments, const TracedFunction& forward) {
  const NumericsScope numerics(settings_.numerics);
  // Inside a traced step, the module is part of the program of that step.
  if (settings_.backend == "eager" || compiling()) return {{forward(nullptr).tensors}, nullptr};
  return programs_.call(arguments, settings_, forward, {.what = "module", .fall_back = !settings_.fullgraph});
}

}  // namespace tessera::compiler
