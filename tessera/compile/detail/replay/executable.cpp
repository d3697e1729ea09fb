#include "tessera/compile/detail/replay/executable.h"

#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/compile/detail/codegen/cpp_kernel.h"
#include "tessera/compile/detail/ir/collective.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/print.h"
#include "tessera/compile/detail/replay/boxed_arguments.h"
#include "tessera/compile/detail/replay/executable_memory.h"
#include "tessera/tracing/detail/invariant_scope.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <sstream>
#include <utility>

namespace tessera::compiler {
namespace {

c10::DataPtr& data_of(const c10::Storage& storage) {
  return const_cast<c10::DataPtr&>(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks());
}

void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace

Executable::Executable(Program program, const std::vector<c10::Storage>& bound, const MakeRunner& make_runner,
                       std::shared_ptr<const codegen::KernelLibrary> library)
    : program_(std::move(program)),
      library_(library || program_.kernels.empty() ? std::move(library)
                                                   : codegen::KernelLibrary::load(program_.kernels)),
      storages_(static_cast<size_t>(program_.buffers)),
      tensors_(program_.values.size()),
      values_in_(static_cast<size_t>(program_.buffers)),
      returned_(static_cast<size_t>(program_.buffers), 0),
      result_of_op_(static_cast<size_t>(program_.buffers), 0),
      is_output_(static_cast<size_t>(program_.buffers), 0),
      allocated_by_op_(static_cast<size_t>(program_.buffers), 0),
      bytes_(program_.buffer_bytes()),
      is_argument_(static_cast<size_t>(program_.buffers), 0) {
  if (make_runner) runner_ = make_runner(program_);
  is_invariant_ = invariant_scope_is_open() && !runner_;
  find_results_of_ops();
  const auto mine = memory_is_not_shared();
  for (size_t b = 0; b < storages_.size() && b < bound.size(); b++)
    if (!mine[b]) storages_[b] = bound[b];
  for (const auto& input : program_.inputs)
    if (input.constant.defined())
      storages_[static_cast<size_t>(program_.buffer_of(input.value))] = input.constant.storage();
  prepare();
}

Executable::~Executable() {
  if (after_next_run_) after_next_run_({});
}

void Executable::prepare() {
  const at::AutoDispatchBelowADInplaceOrView below;
  plan_ = plan_memory(program_, buffers_outside_arena());
  allocate_buffers();
  if (runner_) return;
  for (size_t n = 0; n < program_.nodes.size(); n++) prepare_call(n, program_.nodes[n]);
  renew_returned_buffers(program_.external_buffers());
  free_after_last_use();
  plan_graphs();
}

void Executable::prepare_call(size_t n, const Node& node) {
  if (is_view(program_, node) || kind_of(node) == OpKind::Empty) return;
  const auto device = device_of(program_, node);
  const auto out = results_out_overload(node);
  KernelCall call{n, op_kernel_for(out ? *out : node.op, device)};
  if (is_generated(node)) {
    prepare_generated(call, node);
    calls_.push_back(std::move(call));
    return;
  }
  const auto& arguments = node.schema().arguments();
  for (size_t i = 0; i < node.args.size(); i++) {
    const auto* live = std::get_if<RuntimeScalar>(&node.args[i]);
    if (live) call.live.emplace_back(i, *live);
    call.kernel.arguments.push_back(live ? c10::IValue() : boxed(program_, node.args[i], arguments[i], tensors_));
  }
  if (out) {
    for (const auto& result : node.results)
      call.kernel.arguments.emplace_back(tensors_[static_cast<size_t>(std::get<ValueId>(result))]);
  } else {
    prepare_results(call, node);
  }
  calls_.push_back(std::move(call));
}

// For an op that allocates its results. The storage itself is replaced for a collective, because a pending collective
// is found by its storage, and for a returned value, because the next run must not write to it.
void Executable::prepare_results(KernelCall& call, const Node& node) const {
  call.replaces_storage = kind_of(node) == OpKind::Collective;
  node.each_result(
      [&](ValueId id) { call.replaces_storage |= returned_[static_cast<size_t>(program_.buffer_of(id))] != 0; });
  for (size_t i = 0; i < node.results.size(); i++) {
    if (const auto* id = std::get_if<ValueId>(&node.results[i])) {
      if (*id != kNone && is_new_memory(program_, node, *id)) call.results.emplace_back(i, *id);
    } else if (const auto* list = std::get_if<ValueList>(&node.results[i])) {
      for (size_t k = 0; k < list->size(); k++)
        if ((*list)[k] != kNone && is_new_memory(program_, node, (*list)[k]))
          call.list_results.push_back({i, static_cast<int64_t>(k), (*list)[k]});
    }
  }
}

void Executable::prepare_generated(KernelCall& call, const Node& node) const {
  call.generated = library_->function(generated_name(node));
  call.operands = std::get<ValueList>(node.args[0]);
  call.outs = call.operands.size();
  for (const auto id : call.operands) call.elements += program_[id].type.numel();
  const auto& ins = std::get<ValueList>(node.args[1]);
  call.operands.insert(call.operands.end(), ins.begin(), ins.end());
  call.numbers.assign(node.args.begin() + 3, node.args.end());
}

// Reads the addresses of the operands anew: buffers can be rebound between runs.
void Executable::call_generated(const KernelCall& call) {
  operands_.clear();
  for (size_t i = 0; i < call.operands.size(); i++) {
    auto* impl = tensors_[static_cast<size_t>(call.operands[i])].unsafeGetTensorImpl();
    operands_.push_back(i < call.outs ? impl->mutable_data() : const_cast<void*>(impl->data()));
  }
  kernel_numbers_.clear();
  for (const auto& number : call.numbers) {
    const auto* live = std::get_if<RuntimeScalar>(&number);
    kernel_numbers_.push_back(
        (live ? scalar_value(*live, numbers_) : std::get<c10::IValue>(number)).toScalar().toDouble());
  }
  operands_.push_back(kernel_numbers_.data());
  codegen::call_kernel(call.generated, operands_.data(), call.elements);
}

void Executable::bind(int32_t buffer, const c10::Storage& storage, int64_t shift) {
  if (is_captured_ && is_argument_[static_cast<size_t>(buffer)]) {
    for (const auto& input : program_.inputs) {  // the graphs read the copy
      if (program_.buffer_of(input.value) != buffer) continue;
      const auto& copy = tensors_[static_cast<size_t>(input.value)];
      auto given = copy.alias();
      given.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
      given.unsafeGetTensorImpl()->set_storage_offset(program_[input.value].offset + shift);
      copy.copy_(given);
    }
    return;
  }
  if (!is_argument_[static_cast<size_t>(buffer)]) {
    discard_graphs();
    runs_with_these_addresses_ = 0;
  }
  point_to(buffer, storage, shift);
}

// Makes the memory of a result the memory of its value, which is already an argument of later calls.
// Where graphs read it, it stays where it is.
void Executable::take_result(const at::Tensor& result, ValueId id, bool replace_storage) {
  const auto& value = program_[id];
  TESSERA_CHECK(result.defined(), InternalError, "an op did not return %", id, ", of type ", value.type,
                ", which it returned in the trace");
  auto* impl = result.unsafeGetTensorImpl();
  const bool same_layout = impl->storage_offset() == value.offset &&
                           impl->strides() == c10::IntArrayRef(value.type.strides) &&
                           result.is_conj() == value.type.conj && result.is_neg() == value.type.neg;
  if (C10_UNLIKELY(!same_layout || is_captured_)) {
    // A collective may still write the result. The wait of the program will find nothing to wait for.
    for (const auto& group : program_.groups) funcol::wait(result, group.group);
    if (allocated_by_op_[static_cast<size_t>(value.buffer)] && !is_captured_) renew(value.buffer);
    tensors_[static_cast<size_t>(id)].copy_(result);
  } else if (replace_storage) {
    point_to(value.buffer, result.storage(), 0);
  } else {
    std::swap(data_of(storages_[static_cast<size_t>(value.buffer)]), data_of(impl->storage()));
  }
}

// Copies the outputs of the runner into the buffers of the program, which other tensors alias.
void Executable::run_by_runner() {
  Tensors inputs;
  for (const auto& input : program_.inputs) inputs.push_back(tensors_[static_cast<size_t>(input.value)]);
  const auto outputs = runner_(inputs);
  TESSERA_CHECK(outputs.size() == program_.outputs.size(), UsageError, "the runner of a program returned ",
                outputs.size(), " outputs; the program has ", program_.outputs.size());
  for (size_t b = 0; b < returned_.size(); b++)
    if (returned_[b]) renew(static_cast<int32_t>(b));
  const at::AutoDispatchBelowADInplaceOrView below;
  for (size_t i = 0; i < outputs.size(); i++) {
    const auto id = program_.outputs[i].value;
    if (id == kNone) continue;
    const auto& to = tensors_[static_cast<size_t>(id)];
    TESSERA_CHECK(outputs[i].defined() && outputs[i].sizes() == to.sizes(), UsageError,
                  "the runner of a program returned ",
                  outputs[i].defined() ? c10::str("a tensor of shape ", outputs[i].sizes()) : "an undefined tensor",
                  " for output ", i, ", which has shape ", to.sizes());
    if (!outputs[i].is_alias_of(to)) to.copy_(outputs[i]);
  }
  runs_++;
}

void Executable::run() {
  TESSERA_CHECK(is_invariant_ || !invariant_scope_is_open(), UsageError,
                "Numerics::Invariant: a program that was compiled outside of this scope was called in it; compile the "
                "step in the scope, or with {.numerics = Numerics::Invariant}, and without run_with");
  const InvariantScopePaused ops_are_invariant;
  NodeTimes times;
  if (runner_)
    run_by_runner();
  else if (!after_next_run_ && can_run_graphs())
    run_graphs();
  else
    times = run_calls();
  if (after_next_run_) std::exchange(after_next_run_, nullptr)(times);
}

// The times are empty if nobody has asked for them.
Executable::NodeTimes Executable::run_calls() {
  discard_graphs();  // calls allocate their results elsewhere
  arenas_in_use_ = true;
  read_numbers();
  NodeTimes times(after_next_run_ ? program_.nodes.size() : 0, 0.0);
  run_range(0, calls_.size(), times);
  runs_++;
  runs_with_these_addresses_++;
  return times;
}

void Executable::read_numbers() {
  numbers_.clear();
  for (const auto& number : program_.numbers) numbers_.push_back(number.read());
}

void Executable::run_range(size_t begin, size_t end, NodeTimes& times) {
  using Clock = std::chrono::steady_clock;
  const OpModesOff no_modes;  // an op mode must not see the ops that kernels call internally
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::AutoGradMode grad_mode(true);  // as in the trace: the kernel of LSTM returns its workspace only then
  const auto now = [&] {
    if (times.empty()) return Clock::time_point();
    for (const auto& arena : plan_.arenas) synchronize(arena.device);
    return Clock::now();
  };
  const bool recorded = at::hasCallbacks();  // a profiler is active
  for (size_t i = begin; i < end; i++) {
    auto& call = calls_[i];
    const auto start = now();
    if (recorded) {
      const auto& node = program_.nodes[call.node];
      RECORD_FUNCTION(is_generated(node) ? "kernel " + generated_name(node) : node.name(),
                      c10::ArrayRef<const c10::IValue>{});
      run_call(call);
    } else {
      run_call(call);
    }
    if (!times.empty()) times[call.node] = std::chrono::duration<double, std::milli>(now() - start).count();
  }
  stack_.clear();
}

void Executable::run_call(KernelCall& call) {
  if (!is_captured_)
    for (const auto buffer : call.new_memory) renew(buffer);
  call.runs++;
  if (call.generated) {
    call_generated(call);
  } else {
    for (const auto& [i, live] : call.live) call.kernel.arguments[i] = scalar_value(live, numbers_);
    call.kernel.call(stack_);
    for (const auto& [i, id] : call.results) take_result(stack_[i].toTensor(), id, call.replaces_storage);
    for (const auto& [i, at, id] : call.list_results)
      take_result(stack_[i].toTensorList()[static_cast<size_t>(at)], id, call.replaces_storage);
    if (!call.last_used.empty()) stack_.clear();  // its results are the last owners of memory
  }
  for (const auto buffer : call.last_used) {
    if ((is_captured_ || is_capturing_) && used_outside_graphs_[static_cast<size_t>(buffer)]) continue;
    const auto& storage = storages_[static_cast<size_t>(buffer)];
    data_of(storage) = c10::DataPtr(nullptr, storage.device());
  }
}

at::Tensor Executable::output(const Output& output) const {
  if (output.value == kNone) return {};
  auto value = tensor_for(output.value);
  const bool of_graph = is_captured_ && returned_[static_cast<size_t>(program_.buffer_of(output.value))];
  return of_graph ? value.clone() : value;
}

std::string Executable::listing() const {
  std::ostringstream out;
  print_declarations(out, program_, false);
  auto call = calls_.begin();
  for (size_t n = 0; n < program_.nodes.size(); n++) {
    const auto& node = program_.nodes[n];
    std::ostringstream line;
    print_node(line, program_, node);
    auto text = line.str();
    if (is_generated(node)) {  // tessera.cpp_kernel(..., "name") is listed as name(...)
      const auto& name = generated_name(node);
      text.replace(text.find(", \"" + name + "\""), name.size() + 4, "");
      text.replace(0, node.name().size(), name);
    } else if (const auto* row = row_of(node); row && row->listed_as) {
      const auto at = text.find(node.name() + "(");
      text.replace(at, node.name().size(), row->listed_as);
    }
    out << text;
    if (call != calls_.end() && call->node == n) {
      out << "  # ";
      if (kind_of(node) == OpKind::Collective) out << collective_of(program_, node).bytes << " bytes, ";
      out << "ran " << call->runs;
      if (has_graphs() && !call->why_not_captured.empty()) out << ", in no CUDA graph: " << call->why_not_captured;
      call++;
    }
    out << "\n";
  }
  print_outputs(out, program_);
  return out.str();
}

}  // namespace tessera::compiler
