#include "tessera/compile/detail/replay/bindings.h"

#include "tessera/compile/detail/trace/plain.h"

#include <algorithm>
#include <unordered_map>

namespace tessera::compiler {
Bindings::Bindings(const Program& program, const Tracer::Result& traced, const Arguments& arguments,
                   const std::vector<OldGradient>& gradients) {
  std::unordered_map<const void*, const OldGradient*> by_memory;
  for (const auto& each : gradients) by_memory.emplace(plain_of(each.gradient).storage().unsafeGetStorageImpl(), &each);
  const auto external = program.external_buffers();
  std::vector<char> written(external.size(), 0);
  for (const auto& node : program.nodes)
    node.each_write([&](ValueId id) { written[static_cast<size_t>(program.buffer_of(id))] = 1; });
  std::vector<char> has_owner(external.size(), 0);
  for (const auto& input : program.inputs)
    if (input.role != Role::Argument) has_owner[static_cast<size_t>(program.buffer_of(input.value))] = 1;
  for (size_t b = 0; b < external.size(); b++) {
    if (!external[b] || !traced.handles[b].defined()) continue;  // constants stay where they are
    External each{static_cast<int32_t>(b), traced.handles[b]};
    each.written = written[b];
    const auto* storage = traced.storages[b].unsafeGetStorageImpl();
    for (size_t a = 0; a < arguments.tensors.size() && each.argument < 0; a++)
      if (arguments.tensors[a].defined() && plain_of(arguments.tensors[a]).storage().unsafeGetStorageImpl() == storage)
        each.argument = static_cast<int>(a);
    if (each.argument >= 0 && has_owner[b]) pinned_.emplace_back(each.argument, storage);
    const auto old = by_memory.find(storage);
    const auto& plain = plain_of(old == by_memory.end() ? owner(each, arguments) : old->second->gradient);
    if (each.argument < 0 && old != by_memory.end()) each.parameter = old->second->parameter;
    if (each.argument >= 0 || each.parameter.defined()) each.handle.reset();
    each.offset = each.bound_offset = plain.storage_offset();
    each.bound = storage;
    externals_.push_back(std::move(each));
  }
}

const at::Tensor& Bindings::owner(const External& each, const Arguments& arguments) {
  if (each.argument >= 0) return arguments.tensors[static_cast<size_t>(each.argument)];
  return each.parameter.defined() ? each.parameter.grad() : each.handle;
}

bool Bindings::fits(const Arguments& arguments) const {
  std::vector<const void*> given;
  for (const auto& t : arguments.tensors)
    given.push_back(t.defined() ? plain_of(t).storage().unsafeGetStorageImpl() : nullptr);
  for (const auto& [argument, storage] : pinned_)
    if (given[static_cast<size_t>(argument)] != storage) return false;
  for (const auto& each : externals_)
    if (each.argument < 0) {
      const void* owned = plain_of(owner(each, arguments)).storage().unsafeGetStorageImpl();
      if (std::find(given.begin(), given.end(), owned) != given.end()) return false;
    }
  return true;
}

void Bindings::bind(Executable& executable, const Arguments& arguments) {
  for (auto& each : externals_) {
    const auto& handle = owner(each, arguments);
    const auto& plain = plain_of(handle);
    const auto* storage = plain.storage().unsafeGetStorageImpl();
    const auto offset = plain.storage_offset();
    if (storage != each.bound || offset != each.bound_offset) {
      executable.bind(each.buffer, plain.storage(), offset - each.offset);
      each.bound = storage;
      each.bound_offset = offset;
    }
    if (each.written) {
      handle.unsafeGetTensorImpl()->bump_version();
      if (!handle.is_same(plain)) plain.unsafeGetTensorImpl()->bump_version();
    }
  }
}

at::Tensor Bindings::tensor_of(int32_t buffer, const Arguments& arguments) const {
  for (const auto& each : externals_)
    if (each.buffer == buffer) return owner(each, arguments);
  return {};
}

}  // namespace tessera::compiler
