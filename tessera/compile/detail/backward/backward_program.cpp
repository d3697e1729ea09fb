#include "tessera/compile/detail/backward/backward_program.h"

#include "tessera/compile/detail/replay/interpret.h"
#include "tessera/compile/detail/trace/local_tensors.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/tracing/detail/tracer_key.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

}  // namespace

Tensors BackwardProgram::run(const Tensors& saved, Tensors gradients) {
  const at::NoGradGuard no_grad;
  prepare(gradients);
  auto results = tracing() ? interpret_ops(saved, gradients) : replay(saved, gradients);
  for (size_t i = 0; i < results.size(); i++) results[i] = wrap_with_spec(std::move(results[i]), result_specs[i]);
  return results;
}

// Local, contiguous gradients with the placements of the outputs.
void BackwardProgram::prepare(Tensors& gradients) const {
  for (size_t i = 0; i < gradients.size(); i++) {
    auto& gradient = gradients[i];
    if (!gradient.defined()) {
      gradient = at::zeros(gradient_types[i].sizes, at::TensorOptions(gradient_types[i].dtype));
    } else if (gradient_specs[i]) {
      const auto& spec = *gradient_specs[i];
      gradient = local_or_self(DTensor(gradient).redistribute(spec.mesh, spec.placements));
    }
    gradient = gradient.contiguous();
  }
}

// Elements by which the values of a saved buffer begin later than at tracing. Forward's own buffers do not move.
int64_t BackwardProgram::shift_of(size_t saved, const at::Tensor& local) const {
  return saved < saved_by_forward ? 0 : local.storage_offset() - saved_offsets[saved];
}

Tensors BackwardProgram::interpret_ops(const Tensors& saved, const Tensors& gradients) const {
  const auto& program = before_lowering;
  Tensors inputs;
  for (const auto& input : program.inputs) {
    if (input.constant.defined()) {
      inputs.push_back(input.constant);
      continue;
    }
    const auto buffer = program.buffer_of(input.value);
    at::Tensor base;
    int64_t shift = 0;
    for (size_t i = 0; i < saved_buffers.size(); i++)
      if (saved_buffers[i] == buffer) {
        base = local_or_self(saved[i]);
        shift = shift_of(i, base);
      }
    for (size_t i = 0; i < gradient_buffers.size(); i++)
      if (gradient_buffers[i] == buffer) base = gradients[i];
    const auto& value = program[input.value];
    inputs.push_back(base.as_strided(value.type.sizes, value.type.strides, value.offset + shift));
  }
  return interpret(program, inputs);
}

Tensors BackwardProgram::replay(const Tensors& saved, const Tensors& gradients) {
  for (size_t i = 0; i < saved_buffers.size(); i++) {
    const auto& local = local_or_self(saved[i]);
    executable->bind(saved_buffers[i], local.storage(), shift_of(i, local));
  }
  for (size_t i = 0; i < gradient_buffers.size(); i++)
    executable->bind(gradient_buffers[i], gradients[i].storage(), gradients[i].storage_offset());
  executable->run();
  Tensors results;
  for (const auto& output : executable->program().outputs) results.push_back(executable->output(output));
  return results;
}

std::vector<size_t> outputs_by_node(const Program& program) {
  std::vector<size_t> defined_by(program.values.size(), 0), order;
  for (size_t n = 0; n < program.nodes.size(); n++)
    program.nodes[n].each_result([&](ValueId id) { defined_by[static_cast<size_t>(id)] = n; });
  for (size_t i = 0; i < program.outputs.size(); i++)
    if (program.outputs[i].value != kNone) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return defined_by[static_cast<size_t>(program.outputs[a].value)] <
           defined_by[static_cast<size_t>(program.outputs[b].value)];
  });
  return order;
}

}  // namespace tessera::compiler
