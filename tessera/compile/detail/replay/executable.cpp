#include "tessera/compile/detail/replay/executable.h"

#include "tessera/base/error.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/compile/detail/codegen/cpp_kernel.h"
#include "tessera/compile/detail/ir/collective.h"
#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/print.h"
#include "tessera/compile/detail/replay/boxed_arguments.h"
#include "tessera/tracing/detail/invariant_scope.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <sstream>
#include <utility>

namespace tessera::compiler {
namespace {

c10::Storage storage_without_memory(int64_t bytes, c10::Device device) {
  return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), c10::DataPtr(nullptr, device),
                      c10::GetAllocator(device.type()), true);
}

c10::DataPtr& data_of(const c10::Storage& storage) {
  return const_cast<c10::DataPtr&>(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks());
}

c10::Storage allocate_storage(int64_t bytes, c10::Device device) {
  auto* allocator = c10::GetAllocator(device.type());
  return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes),
                      allocator->allocate(static_cast<size_t>(bytes)), allocator, true);
}

// Asks for pages of 2 MB: kernels that read a matrix by columns touch another page with each element.
void use_large_pages(const c10::Storage& storage) {
  if (!storage.device().is_cpu()) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(storage.data()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(storage.data()) + storage.nbytes()) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // without: small pages
}

// Returns memory that LibTorch's allocator keeps for later to the device.
void free_cached_memory(c10::Device device) {
  if (!device.is_cpu()) c10::getDeviceAllocator(device.type())->emptyCache();
}

void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

c10::DeviceType device_of(const Program& program, const Node& node) {
  auto device = c10::kCPU;
  const auto check = [&](ValueId id) {
    if (!program[id].type.device.is_cpu()) device = program[id].type.device.type();
  };
  node.each_read(check);
  node.each_result(check);
  return device;
}

constexpr int64_t kRunsBeforeGraph = 2;  // libraries allocate workspaces and choose algorithms in the first runs
constexpr int64_t kMaxGraphs = 4;

// Is every result one defined tensor, not a list?
bool all_results_are_tensors(const Node& node) {
  for (const auto& result : node.results)
    if (!std::holds_alternative<ValueId>(result) || std::get<ValueId>(result) == kNone) return false;
  return !node.results.empty();
}

// Does the op allocate this result? An op that writes to arguments may return them and new tensors.
bool is_new_memory(const Program& program, const Node& node, ValueId result) {
  bool is_new = true;
  if (node.schema().is_mutable())
    node.each_read([&](ValueId id) { is_new &= program.buffer_of(id) != program.buffer_of(result); });
  return is_new;
}

}  // namespace

Executable::Executable(Program program, const std::vector<c10::Storage>& bound, const MakeRunner& make_runner)
    : program_(std::move(program)),
      library_(program_.kernels.empty() ? nullptr : codegen::KernelLibrary::load(program_.kernels)),
      storages_(static_cast<size_t>(program_.buffers)),
      tensors_(program_.values.size()),
      values_in_(static_cast<size_t>(program_.buffers)),
      returned_(static_cast<size_t>(program_.buffers), 0),
      allocated_by_op_(static_cast<size_t>(program_.buffers), 0),
      bytes_(program_.buffer_bytes()),
      is_argument_(static_cast<size_t>(program_.buffers), 0) {
  if (make_runner) runner_ = make_runner(program_);
  is_invariant_ = invariant_scope_is_open() && !runner_;
  const auto mine = memory_is_not_shared();
  for (size_t b = 0; b < storages_.size() && b < bound.size(); b++)
    if (!mine[b]) storages_[b] = bound[b];
  for (const auto& input : program_.inputs)
    if (input.constant.defined())
      storages_[static_cast<size_t>(program_.buffer_of(input.value))] = input.constant.storage();
  prepare();
}

// By buffer: 1 if memory that is bound to it would be wasted. These are old gradients that the program replaces and
// never reads, and new gradients on the CPU, which are in the arena: until the program writes them, temporaries use
// their memory.
std::vector<char> Executable::memory_is_not_shared() const {
  std::vector<char> mine(storages_.size(), 0);
  if (runner_) return mine;
  const auto used = used_buffers(), external = program_.external_buffers();
  for (const auto& input : program_.inputs) {
    const auto b = static_cast<size_t>(program_.buffer_of(input.value));
    mine[b] = input.role == Role::Gradient && !used[b];
  }
  for (const auto& output : program_.outputs) {
    if (output.value == kNone || output.kind != Output::Kind::Gradient) continue;
    const auto b = static_cast<size_t>(program_.buffer_of(output.value));
    mine[b] = !external[b] && program_[output.value].type.device.is_cpu();
  }
  for (const auto& output : program_.outputs)
    if (output.value != kNone && output.kind != Output::Kind::Gradient)
      mine[static_cast<size_t>(program_.buffer_of(output.value))] = 0;
  for (const auto& node : program_.nodes)
    if (!is_view(program_, node) && kind_of(node) != OpKind::Empty && !results_out_overload(node))
      node.each_result([&](ValueId id) {  // the op allocates it
        if (is_new_memory(program_, node, id)) mine[static_cast<size_t>(program_.buffer_of(id))] = 0;
      });
  return mine;
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
  for (const auto& input : program_.inputs)
    if (input.role == Role::Argument) is_argument_[static_cast<size_t>(program_.buffer_of(input.value))] = 1;
  why_no_graph_ = find_why_no_graph();
}

// Bound buffers, outputs, and results that their op allocates. Sets returned_ and allocated_by_op_.
std::vector<char> Executable::buffers_outside_arena() {
  std::vector<char> outside(storages_.size(), 0);
  for (size_t b = 0; b < storages_.size(); b++) outside[b] = static_cast<bool>(storages_[b]);
  const auto external = program_.external_buffers();
  const auto mine = memory_is_not_shared();
  for (const auto& output : program_.outputs) {
    if (output.value == kNone) continue;
    const auto b = static_cast<size_t>(program_.buffer_of(output.value));
    outside[b] = !mine[b];
    returned_[b] |= output.kind == Output::Kind::Return && !external[b] && !storages_[b];
  }
  for (const auto& node : program_.nodes) {
    if (is_view(program_, node) || kind_of(node) == OpKind::Empty) continue;
    if (results_out_overload(node)) continue;
    node.each_result([&](ValueId id) {
      if (!is_new_memory(program_, node, id)) return;
      const auto b = static_cast<size_t>(program_.buffer_of(id));
      allocated_by_op_[b] = !outside[b] && !external[b];
    });
  }
  for (size_t b = 0; b < outside.size(); b++) outside[b] |= allocated_by_op_[b];
  if (runner_) outside.assign(outside.size(), 1);
  return outside;
}

void Executable::allocate_buffers() {
  const auto used = used_buffers();
  std::vector<c10::Device> devices(storages_.size(), c10::kCPU);
  for (const auto& value : program_.values) devices[static_cast<size_t>(value.buffer)] = value.type.device;
  for (const auto& arena : plan_.arenas) free_cached_memory(arena.device);  // of the trace
  allocate_arenas();
  for (size_t b = 0; b < storages_.size(); b++) {
    if (storages_[b]) continue;
    if (plan_.offsets[b] != MemoryPlan::kOutside) {
      storages_[b] = storage_in_arena(b, devices[b]);
    } else if (allocated_by_op_[b]) {
      storages_[b] = storage_without_memory(bytes_[b], devices[b]);
    } else {
      storages_[b] = allocate_storage(used[b] ? bytes_[b] : 0, devices[b]);
    }
  }
  for (size_t v = 0; v < tensors_.size(); v++) {
    values_in_[static_cast<size_t>(program_.values[v].buffer)].push_back(static_cast<ValueId>(v));
    tensors_[v] = tensor_for(static_cast<ValueId>(v));
  }
}

void Executable::allocate_arenas() {
  arenas_.clear();
  for (const auto& arena : plan_.arenas) {
    arenas_.push_back(allocate_storage(arena.bytes, arena.device));
    use_large_pages(arenas_.back());
  }
}

// Outputs, which the caller may keep, own their arena.
c10::Storage Executable::storage_in_arena(size_t buffer, c10::Device device) {
  const auto& arena = arenas_[static_cast<size_t>(&plan_.arena(device) - plan_.arenas.data())];
  auto* begin = static_cast<char*>(arena.mutable_data()) + plan_.offsets[buffer];
  const auto bytes = static_cast<size_t>(bytes_[buffer]);
  const bool is_output = std::any_of(program_.outputs.begin(), program_.outputs.end(), [&](const Output& output) {
    return output.value != kNone && program_.buffer_of(output.value) == static_cast<int32_t>(buffer);
  });
  if (!is_output)
    return c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(begin, device), nullptr, false);
  const auto free_owner = [](void* owner) { delete static_cast<c10::Storage*>(owner); };
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                      c10::DataPtr(begin, new c10::Storage(arena), free_owner, device),
                      c10::GetAllocator(device.type()), true);
}

// Lets the first call that touches a returned buffer allocate new memory for it.
void Executable::renew_returned_buffers(const std::vector<char>& external) {
  auto seen = external;
  for (auto& call : calls_) {
    const auto see = [&](ValueId id) {
      const auto b = static_cast<size_t>(program_.buffer_of(id));
      if (returned_[b] && !seen[b]) call.new_memory.push_back(static_cast<int32_t>(b));
      seen[b] = 1;
    };
    program_.nodes[call.node].each_read(see);  // an in-place op may be the first to fill an empty tensor
    program_.nodes[call.node].each_result(see);
  }
}

// A temporary that its op allocates has memory until the last call that uses it, as in eager mode.
void Executable::free_after_last_use() {
  const auto alive = lifetimes(program_);
  for (size_t b = 0; b < alive.size(); b++) {
    if (!allocated_by_op_[b] || alive[b].first < 0) continue;
    const auto later = std::upper_bound(calls_.begin(), calls_.end(), static_cast<size_t>(alive[b].last),
                                        [](size_t node, const KernelCall& call) { return node < call.node; });
    if (later != calls_.begin()) std::prev(later)->last_used.push_back(static_cast<int32_t>(b));
  }
}

// Buffers of values that a node or output uses. Passes leave unused values in the program.
std::vector<char> Executable::used_buffers() const {
  std::vector<char> used(storages_.size(), 0);
  const auto use = [&](ValueId id) { used[static_cast<size_t>(program_.buffer_of(id))] = 1; };
  for (const auto& node : program_.nodes) {
    if (runner_) break;  // a runner allocates its own temporaries
    node.each_read(use);
    node.each_result(use);
  }
  for (const auto& output : program_.outputs)
    if (output.value != kNone) use(output.value);
  return used;
}

at::Tensor Executable::tensor_for(ValueId id) const {
  const auto& value = program_[id];
  const auto key = value.type.device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storages_[static_cast<size_t>(value.buffer)]),
                                               c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(value.type.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(value.type.sizes, value.type.strides,
                                                      std::optional<int64_t>(value.offset));
  if (value.type.conj) tensor._set_conj(true);
  if (value.type.neg) tensor._set_neg(true);
  return tensor;
}

// The overload that writes all results of the node into given memory. None if a result is an argument.
std::optional<c10::OperatorHandle> Executable::results_out_overload(const Node& node) const {
  if (!all_results_are_tensors(node)) return {};
  bool all_new = true;
  node.each_result([&](ValueId id) { all_new &= is_new_memory(program_, node, id); });
  return all_new ? out_overload(node.op, device_of(program_, node)) : std::nullopt;
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
  if (graph_ && is_argument_[static_cast<size_t>(buffer)]) {
    for (const auto& input : program_.inputs) {  // the graph reads the copy
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
    graph_.reset();
    runs_with_these_addresses_ = 0;
  }
  point_to(buffer, storage, shift);
}

void Executable::point_to(int32_t buffer, const c10::Storage& storage, int64_t shift) {
  storages_[static_cast<size_t>(buffer)] = storage;
  for (const auto id : values_in_[static_cast<size_t>(buffer)]) {
    auto* impl = tensors_[static_cast<size_t>(id)].unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(storage);
    impl->set_storage_offset(program_[id].offset + shift);
  }
}

void Executable::give_new_memory(int32_t buffer) {
  graph_.reset();
  if (plan_.offsets[static_cast<size_t>(buffer)] == MemoryPlan::kOutside) return renew(buffer);
  if (!arenas_in_use_) return;  // it is new: another buffer was given new memory since the last run
  arenas_in_use_ = false;
  allocate_arenas();
  for (size_t b = 0; b < storages_.size(); b++)
    if (plan_.offsets[b] != MemoryPlan::kOutside)
      point_to(static_cast<int32_t>(b), storage_in_arena(b, storages_[b].device()), 0);
}

void Executable::renew(int32_t buffer) {
  const auto& old = storages_[static_cast<size_t>(buffer)];
  point_to(buffer, allocate_storage(bytes_[static_cast<size_t>(buffer)], old.device()), 0);
}

// Makes the memory of a result the memory of its value, which is already an argument of later calls.
void Executable::take_result(const at::Tensor& result, ValueId id, bool replace_storage) {
  const auto& value = program_[id];
  TESSERA_CHECK(result.defined(), InternalError, "an op did not return %", id, ", of type ", value.type,
                ", which it returned in the trace");
  auto* impl = result.unsafeGetTensorImpl();
  const bool same_layout = impl->storage_offset() == value.offset &&
                           impl->strides() == c10::IntArrayRef(value.type.strides) &&
                           result.is_conj() == value.type.conj && result.is_neg() == value.type.neg;
  if (C10_UNLIKELY(!same_layout)) {
    // A collective may still write the result. The wait of the program will find nothing to wait for.
    for (const auto& group : program_.groups) funcol::wait(result, group.group);
    if (allocated_by_op_[static_cast<size_t>(value.buffer)]) renew(value.buffer);
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
  else if (why_no_graph_.empty() && runs_with_these_addresses_ >= kRunsBeforeGraph && !after_next_run_)
    run_graph();
  else
    times = run_calls();
  if (after_next_run_) std::exchange(after_next_run_, nullptr)(times);
}

// The times are empty if nobody has asked for them.
Executable::NodeTimes Executable::run_calls() {
  using Clock = std::chrono::steady_clock;
  graph_.reset();  // calls allocate their results elsewhere
  arenas_in_use_ = true;
  const OpModesOff no_modes;  // an op mode must not see the ops that kernels call internally
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::AutoGradMode grad_mode(true);  // as in the trace: the kernel of LSTM returns its workspace only then
  numbers_.clear();
  for (const auto& number : program_.numbers) numbers_.push_back(number.read());
  NodeTimes times(after_next_run_ ? program_.nodes.size() : 0, 0.0);
  const auto now = [&] {
    if (times.empty()) return Clock::time_point();
    for (const auto& arena : plan_.arenas) synchronize(arena.device);
    return Clock::now();
  };
  const bool recorded = at::hasCallbacks();  // a profiler is active
  for (auto& call : calls_) {
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
  runs_++;
  runs_with_these_addresses_++;
  return times;
}

std::string Executable::find_why_no_graph() const {
  std::optional<c10::Device> device;
  for (const auto& call : calls_) {
    const auto& node = program_.nodes[call.node];
    std::string why;
    if (kind_of(node) == OpKind::Collective) why = "it communicates";
    if (call.generated) why = "it runs on the CPU";
    if (!call.live.empty()) why = "it takes a number that is read on every run";
    const auto see = [&](ValueId id) {
      const auto& here = program_[id].type.device;
      if (!device) device = here;
      if (!here.is_cuda() || here != *device) why = c10::str("it uses a tensor on ", here);
    };
    node.each_read(see);
    node.each_result(see);
    node.each_write([&](ValueId id) {
      if (is_argument_[static_cast<size_t>(program_.buffer_of(id))]) why = "it writes to an argument of the step";
    });
    if (!why.empty()) return c10::str(node.name(), ": ", why);
  }
  for (const auto& input : program_.inputs)
    if (input.role == Role::Argument && program_[input.value].type.span() != program_[input.value].type.numel())
      return "argument " + input.name + " has gaps or overlaps in memory";
  return device ? "" : "the program is empty";
}

// Gives the graph memory of its own for the arguments, and records all calls.
void Executable::capture_graph() {
  const auto device = plan_.arenas.empty() ? program_[program_.inputs.at(0).value].type.device : plan_.arenas[0].device;
  for (const auto& input : program_.inputs) {
    if (input.role != Role::Argument) continue;
    const auto buffer = program_.buffer_of(input.value);
    auto& copy = tensors_[static_cast<size_t>(input.value)];
    const auto given = copy.alias();
    point_to(buffer, allocate_storage(bytes_[static_cast<size_t>(buffer)], device), 0);
    copy.copy_(given);
  }
  arguments_are_copies_ = true;
  free_cached_memory(device);  // a graph has a pool of its own
  try {
    graph_ = cuda::Graph::capture(device, [&] { run_calls(); });
    runs_--;  // nothing has run yet
    graphs_++;
  } catch (const std::exception& error) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    why_no_graph_ = torch_error ? torch_error->what_without_backtrace() : error.what();
    TORCH_WARN("compile: the step runs without a CUDA graph: ", why_no_graph_);
  }
}

void Executable::run_graph() {
  if (!graph_ && graphs_ == kMaxGraphs) why_no_graph_ = "the memory of its parameters or gradients moves between calls";
  if (!graph_ && why_no_graph_.empty()) capture_graph();
  if (!graph_) {
    run_calls();
    return;
  }
  graph_->replay();
  runs_++;
  for (auto& call : calls_) call.runs++;
}

void Executable::run_call(KernelCall& call) {
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
    const auto& storage = storages_[static_cast<size_t>(buffer)];
    data_of(storage) = c10::DataPtr(nullptr, storage.device());
  }
}

at::Tensor Executable::output(const Output& output) const {
  if (output.value == kNone) return {};
  auto value = tensor_for(output.value);
  const bool of_graph = graph_ && returned_[static_cast<size_t>(program_.buffer_of(output.value))];
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
      out << "ran " << (call++)->runs;
    }
    out << "\n";
  }
  print_outputs(out, program_);
  return out.str();
}

}  // namespace tessera::compiler
