#include "tessera/compile/detail/replay/input_bindings.h"

#include "tessera/dtensor/detail/meta.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

// Null for a sparse tensor.
const void* storage_id(const at::Tensor& t) {
  const auto& local = local_or_self(t);
  return local.has_storage() ? local.storage().unsafeGetStorageImpl() : nullptr;
}

int64_t bytes_between(const at::Tensor& from, const at::Tensor& to) {
  const auto first_byte = [](const at::Tensor& t) {
    return local_or_self(t).storage_offset() * static_cast<int64_t>(local_or_self(t).itemsize());
  };
  return first_byte(to) - first_byte(from);
}

}  // namespace

InputBindings::InputBindings(const Program& program, const Tracer::Result& traced, const CallArguments& arguments,
                             const std::vector<OldGradient>& gradients) {
  std::unordered_map<const void*, const OldGradient*> by_storage;
  for (const auto& each : gradients) by_storage.emplace(storage_id(each.gradient), &each);
  const auto external = program.external_buffers();
  std::vector<char> written(external.size(), 0), used(external.size(), 0);
  const auto use = [&](ValueId id) { used[static_cast<size_t>(program.buffer_of(id))] = 1; };
  for (const auto& node : program.nodes) {
    node.each_write([&](ValueId id) { written[static_cast<size_t>(program.buffer_of(id))] = 1; });
    node.each_read(use);
    node.each_result(use);
  }
  for (const auto& output : program.outputs)
    if (output.value != kNone) use(output.value);
  std::vector<char> is_other_input = traced.reads_outside, is_fixed(external.size(), 0);
  is_other_input.resize(external.size(), 0);
  for (const auto& input : program.inputs) {
    const auto buffer = static_cast<size_t>(program.buffer_of(input.value));
    if (input.role != Role::Argument) is_other_input[buffer] = 1;
    if (input.role != Role::Argument && input.role != Role::Gradient) is_fixed[buffer] = 1;
  }
  for (size_t b = 0; b < external.size(); b++) {
    if (!external[b] || !traced.owners[b].defined()) continue;  // the memory of a constant never moves
    Binding each{static_cast<int32_t>(b), traced.owners[b]};
    each.written = written[b];
    const void* storage = traced.storages[b].unsafeGetStorageImpl();
    for (size_t a = 0; a < arguments.tensors.size() && each.argument < 0; a++)
      if (arguments.tensors[a].defined() && storage_id(arguments.tensors[a]) == storage)
        each.argument = static_cast<int>(a);
    if (each.argument >= 0 && is_other_input[b]) aliased_.emplace_back(each.argument, storage);
    if (!used[b]) continue;  // a gradient that the step only replaces: it may be undefined later
    const auto old = is_fixed[b] ? by_storage.end() : by_storage.find(storage);
    const auto& local = local_or_self(old == by_storage.end() ? owner(each, arguments) : old->second->gradient);
    if (each.argument < 0 && old != by_storage.end()) each.parameter = old->second->parameter;
    if (each.argument >= 0 || each.parameter.defined()) each.fixed.reset();
    each.traced_offset = each.bound_offset = local.storage_offset();
    each.bound = storage;
    if (b < traced.reads_by_offset.size() && traced.reads_by_offset[b])
      each.storage_bytes = static_cast<int64_t>(traced.storages[b].nbytes());
    bindings_.push_back(std::move(each));
  }
  find_shared_memory(arguments, gradients);
}

void InputBindings::find_shared_memory(const CallArguments& arguments, const std::vector<OldGradient>& gradients) {
  std::unordered_map<const void*, size_t> by_storage;
  for (size_t i = 0; i < bindings_.size(); i++) by_storage.emplace(bindings_[i].bound, i);
  const auto add = [&](const at::Tensor& tensor, const at::Tensor& in_memory, bool is_gradient) {
    const auto found = by_storage.find(storage_id(in_memory));
    if (found == by_storage.end()) return;
    const auto& binding = bindings_[found->second];
    const bool is_owner = is_gradient ? binding.parameter.is_same(tensor) : binding.fixed.is_same(tensor);
    if (is_owner || (binding.argument >= 0 && !is_gradient)) return;
    const auto& first = binding.parameter.defined() ? binding.parameter.grad() : owner(binding, arguments);
    shared_.push_back({tensor, found->second, is_gradient, bytes_between(first, in_memory)});
  };
  for (const auto& [tensor, role, name] : lift(arguments)) {
    const bool is_handle_of_lift = tensor.use_count() == 1;  // nobody else can change it
    if (role != Role::Argument && role != Role::Gradient && !is_handle_of_lift) add(tensor, tensor, false);
  }
  for (const auto& each : gradients) add(each.parameter, each.gradient, true);
}

const at::Tensor& InputBindings::owner(const Binding& each, const CallArguments& arguments) {
  if (each.argument >= 0) return arguments.tensors[static_cast<size_t>(each.argument)];
  return each.parameter.defined() ? each.parameter.grad() : each.fixed;
}

// Gradients change with each call, and so does what is bound where inputs have moved.
void InputBindings::add_to(GuardSnapshot& snapshot) {
  fixed_storages_.clear();
  std::vector<const void*> storages;
  for (const auto& each : bindings_) {
    if (each.storage_bytes) return;
    if (each.argument >= 0) continue;
    const auto& local = local_or_self(each.fixed);
    if (each.parameter.defined() || !local.is_same(each.fixed) || storage_id(local) != each.bound) return;
    if (local.use_count() > 1)  // somebody else can change it
      snapshot.add(local.unsafeGetTensorImpl()->unsafe_storage());
    storages.push_back(each.bound);
  }
  if (shared_.empty()) fixed_storages_ = std::move(storages);
}

bool InputBindings::fits(const CallArguments& arguments, bool unchanged) const {
  c10::SmallVector<const void*, 8> given;
  for (const auto& t : arguments.tensors) given.push_back(t.defined() ? storage_id(t) : nullptr);
  for (const auto& [argument, storage] : aliased_)
    if (given[static_cast<size_t>(argument)] != storage) return false;
  if (unchanged && !fixed_storages_.empty())
    return std::none_of(given.begin(), given.end(), [&](const void* storage) {
      return std::find(fixed_storages_.begin(), fixed_storages_.end(), storage) != fixed_storages_.end();
    });
  bool moved = false;
  for (const auto& each : bindings_) {
    const auto& tensor = owner(each, arguments);
    if (!tensor.defined()) return false;
    if (each.storage_bytes) {
      const auto& local = local_or_self(tensor);
      if (local.storage_offset() != each.traced_offset ||
          static_cast<int64_t>(local.storage().nbytes()) < *each.storage_bytes)
        return false;
    }
    if (each.argument >= 0) continue;
    const auto* storage = storage_id(tensor);
    if (std::find(given.begin(), given.end(), storage) != given.end()) return false;
    moved |= storage != each.bound;
  }
  for (const auto& [tensor, binding, is_gradient, bytes] : shared_) {
    const auto &now = is_gradient ? tensor.grad() : tensor, &first = owner(bindings_[binding], arguments);
    if (!now.defined() || storage_id(now) != storage_id(first) || bytes_between(first, now) != bytes) return false;
  }
  if (!moved) return true;
  std::unordered_set<const void*> storages;  // each buffer of the program has its own
  return std::all_of(bindings_.begin(), bindings_.end(), [&](const Binding& each) {
    return each.argument >= 0 || storages.insert(storage_id(owner(each, arguments))).second;
  });
}

void InputBindings::bind(Executable& executable, const CallArguments& arguments) {
  for (auto& each : bindings_) {
    const auto& tensor = owner(each, arguments);
    const auto& local = local_or_self(tensor);
    const void* storage = local.storage().unsafeGetStorageImpl();
    const auto offset = local.storage_offset();
    if (storage != each.bound || offset != each.bound_offset || (each.argument >= 0 && executable.copies_arguments())) {
      executable.bind(each.buffer, local.storage(), offset - each.traced_offset);
      each.bound = storage;
      each.bound_offset = offset;
    }
    if (each.written) {
      tensor.unsafeGetTensorImpl()->bump_version();
      if (!tensor.is_same(local)) local.unsafeGetTensorImpl()->bump_version();
    }
  }
}

bool InputBindings::read_by_offset() const {
  return std::any_of(bindings_.begin(), bindings_.end(),
                     [](const Binding& each) { return each.storage_bytes.has_value(); });
}

at::Tensor InputBindings::tensor_of(int32_t buffer, const CallArguments& arguments) const {
  for (const auto& each : bindings_)
    if (each.buffer == buffer) return owner(each, arguments);
  return {};
}

}  // namespace tessera::compiler
