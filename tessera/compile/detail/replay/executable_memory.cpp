#include "tessera/compile/detail/replay/executable_memory.h"

#include "tessera/compile/detail/ir/dependencies.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/replay/executable.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

// The memory of an Executable: which buffers are in the arena, bound to tensors of the caller, or allocated by ops.
namespace tessera::compiler {
namespace {

c10::Storage storage_without_memory(int64_t bytes, c10::Device device) {
  return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes), c10::DataPtr(nullptr, device),
                      c10::GetAllocator(device.type()), true);
}

// Asks for pages of 2 MB: kernels that read a matrix by columns touch another page with each element.
void use_large_pages(const c10::Storage& storage) {
  if (!storage.device().is_cpu()) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(storage.data()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(storage.data()) + storage.nbytes()) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // without: small pages
}

// Is every result one defined tensor, not a list?
bool all_results_are_tensors(const Node& node) {
  for (const auto& result : node.results)
    if (!std::holds_alternative<ValueId>(result) || std::get<ValueId>(result) == kNone) return false;
  return !node.results.empty();
}

}  // namespace

c10::Storage allocate_storage(int64_t bytes, c10::Device device) {
  auto* allocator = c10::GetAllocator(device.type());
  return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes),
                      allocator->allocate(static_cast<size_t>(bytes)), allocator, true);
}

void free_cached_memory(c10::Device device) {
  if (!device.is_cpu()) c10::getDeviceAllocator(device.type())->emptyCache();
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

bool is_new_memory(const Program& program, const Node& node, ValueId result) {
  bool is_new = true;
  if (node.schema().is_mutable())
    node.each_read([&](ValueId id) { is_new &= program.buffer_of(id) != program.buffer_of(result); });
  return is_new;
}

// Sets result_of_op_ and is_output_.
void Executable::find_results_of_ops() {
  for (const auto& output : program_.outputs)
    if (output.value != kNone) is_output_[static_cast<size_t>(program_.buffer_of(output.value))] = 1;
  for (const auto& node : program_.nodes) {
    if (is_view(program_, node) || kind_of(node) == OpKind::Empty || results_out_overload(node)) continue;
    node.each_result([&](ValueId id) {
      if (is_new_memory(program_, node, id)) result_of_op_[static_cast<size_t>(program_.buffer_of(id))] = 1;
    });
  }
}

// By buffer: 1 if memory that is bound to it would be wasted. These are old gradients that the program replaces and
// never reads, and new gradients, which are in the arena: until the program writes them, temporaries use their memory.
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
    mine[b] = !external[b];
  }
  for (const auto& output : program_.outputs)
    if (output.value != kNone && output.kind != Output::Kind::Gradient)
      mine[static_cast<size_t>(program_.buffer_of(output.value))] = 0;
  for (size_t b = 0; b < mine.size(); b++)
    if (result_of_op_[b]) mine[b] = 0;
  return mine;
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
  for (size_t b = 0; b < outside.size(); b++) allocated_by_op_[b] = result_of_op_[b] && !outside[b] && !external[b];
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
  if (!is_output_[buffer])
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

void Executable::point_to(int32_t buffer, const c10::Storage& storage, int64_t shift) {
  storages_[static_cast<size_t>(buffer)] = storage;
  for (const auto id : values_in_[static_cast<size_t>(buffer)]) {
    auto* impl = tensors_[static_cast<size_t>(id)].unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(storage);
    impl->set_storage_offset(program_[id].offset + shift);
  }
}

void Executable::give_new_memory(int32_t buffer) {
  discard_graphs();
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

}  // namespace tessera::compiler
