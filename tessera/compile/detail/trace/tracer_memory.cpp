#include "tessera/base/detail/libtorch_compat.h"
#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/trace/tracer.h"
#include "tessera/dtensor/detail/meta.h"

#include <ATen/ops/empty.h>

#include <algorithm>

// The memory that a trace sees: what it writes is restored afterwards, a pointer to it is refused, and what the host
// has filled is a constant of the program.
namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

constexpr const char* kMemoryAccess =
    "compile: the step reads the memory of a tensor by a pointer (accessor, data_ptr, or an op that does so on the "
    "host, such as tensor_split with a tensor), so it depends on values, and a compiled step cannot read values on the "
    "host: use ops on tensors, or read the memory outside of the step";

// A byte tensor over all of a storage.
at::Tensor storage_as_bytes(const c10::intrusive_ptr<c10::StorageImpl>& storage) {
  const auto size = static_cast<int64_t>(storage->nbytes());
  return at::empty({0}, at::TensorOptions(at::kByte).device(storage->device()))
      .set_(c10::Storage(storage), 0, {size}, {1});
}

// Does the op overwrite its argument without reading it? An argument that is only partly overwritten counts.
bool overwrites(const c10::OperatorHandle& op, size_t argument) {
  if (!writes_argument(op, argument)) return false;
  if (op.schema().arguments()[argument].is_out() || kind_of(op) == OpKind::Random) return true;
  const auto& name = op.operator_name().name;
  if (name.starts_with("tessera::elementwise_") || name == "tessera::adam_") return false;
  return name.starts_with("tessera::") || name.ends_with("copy_") || name.ends_with("fill_") || name.ends_with("zero_");
}

// Does the op return a view of its argument?
bool views_argument(const c10::OperatorHandle& op, size_t argument) {
  const auto* alias = op.schema().arguments()[argument].alias_info();
  return alias && !alias->isWrite();
}

}  // namespace

void Tracer::note_input(const at::Tensor& t, Role role, const std::string& name) {
  const OpModesOff off;
  if (t.is_inference()) return;
  inputs_before_.push_back({t, t.variable_data(), role, name});
  // from_blob() in the function: the memory may be freed when it returns.
  if (role == Role::Captured && t.storage().nbytes() > 0 && !t.storage().data_ptr().get_context())
    inputs_before_.back().copy = storage_as_bytes(t.storage().getWeakStorageImpl().lock()).clone();
}

void Tracer::save_before_write(const Node& node) {
  node.each_write([&](ValueId id) {
    auto& buffer = buffers_[static_cast<size_t>(program_.buffer_of(id))];
    if (!buffer.external || buffer.saved_bytes.defined()) return;
    buffer.saved_bytes = storage_as_bytes(buffer.weak.lock()).clone();
  });
}

void Tracer::set_protected(int32_t id, bool on) {
  auto& buffer = buffers_[static_cast<size_t>(id)];
  on = on && buffer.protect && !memory_access_;
  if (on == buffer.is_protected) return;
  buffer.is_protected = on;
  const auto storage = buffer.weak.lock();
  if (storage) libtorch::refuse_memory_access(*storage, on, std::string(kMemoryAccess));
}

void Tracer::set_protected(const Node& node, bool on) {
  const auto set = [&](ValueId id) { set_protected(program_.buffer_of(id), on); };
  node.each_read(set);
  node.each_result(set);
}

void Tracer::allow_memory_access() {
  memory_access_ = true;
  for (size_t b = 0; b < buffers_.size(); b++) set_protected(static_cast<int32_t>(b), false);
}

std::optional<std::string> Tracer::memory_access_error(const std::string& what) {
  return what.find(kMemoryAccess) == std::string::npos ? std::nullopt : std::optional<std::string>(kMemoryAccess);
}

// Memory that an op such as empty() returned and the host has filled, as torch::tensor(list) does: its content is a
// constant of the program.
void Tracer::keep_numbers_from_host(const c10::OperatorHandle& op, const std::vector<Arg>& args) {
  const auto keep = [&](ValueId id, size_t argument) {
    if (id == kNone || views_argument(op, argument)) return;
    const auto b = static_cast<size_t>(program_.buffer_of(id));
    if (!buffers_[b].unwritten) return;
    buffers_[b].unwritten = false;
    buffers_[b].protect = true;
    const auto storage = buffers_[b].weak.lock();
    if (!storage || storage->nbytes() == 0 || overwrites(op, argument)) return;
    const OpModesOff off;
    const auto bytes = storage_as_bytes(storage);
    const auto first = first_value_in(static_cast<int32_t>(b));
    const auto base = program_[first];
    const auto constant = bytes.clone()
                              .narrow(0, 0, base.type.span() * base.type.itemsize())
                              .view(base.type.dtype)
                              .as_strided(base.type.sizes, base.type.strides);
    const auto from = input(constant, Role::Captured, c10::str("constant ", program_.inputs.size()));
    program_.values.push_back(base);
    const auto written = static_cast<ValueId>(program_.values.size() - 1);
    program_.nodes.push_back({find_op("aten.copy_"), {first, from, c10::IValue(false)}, {written}, running_module()});
  };
  for (size_t i = 0; i < args.size(); i++) {
    if (const auto* id = std::get_if<ValueId>(&args[i])) keep(*id, i);
    if (const auto* list = std::get_if<ValueList>(&args[i]))
      for (const auto id : *list) keep(id, i);
  }
}

std::optional<std::string> Tracer::restore_changed_inputs() {
  std::optional<std::string> first;
  const OpModesOff off;
  for (const auto& each : inputs_before_) {
    const auto &now = each.tensor, &before = each.alias;
    if (is_dtensor(now)) continue;  // FSDP has sharded it, and restores it itself
    if (now.has_storage() && now.storage().unsafeGetStorageImpl() == before.storage().unsafeGetStorageImpl() &&
        Type::of(now) == Type::of(before) && now.storage_offset() == before.storage_offset())
      continue;
    if (!first) first = c10::str(each.role, " ", each.name, ", of shape ", before.sizes());
    now.set_data(before);
  }
  return first;
}

std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> Tracer::storages_left() const {
  std::unordered_set<const void*> gradients;
  const auto add = [&](const at::Tensor& leaf) {
    if (leaf.grad().defined() && local_or_self(leaf.grad()).has_storage())
      gradients.insert(local_or_self(leaf.grad()).storage().unsafeGetStorageImpl());
  };
  for (const auto& leaf : leaves_) add(leaf.tensor);
  for (const auto& each : inputs_before_)
    if (each.role == Role::Parameter) add(each.tensor);
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> all;
  for (const auto& buffer : buffers_)
    if (!buffer.external)
      if (const auto storage = buffer.weak.lock(); storage && !gradients.count(storage.get()))
        all.push_back(buffer.weak);
  return all;
}

void Tracer::restore_memory() {
  allow_memory_access();
  for (auto& buffer : buffers_) {
    if (!buffer.saved_bytes.defined()) continue;
    // resize_ may have enlarged it
    if (const auto storage = buffer.weak.lock())
      storage_as_bytes(storage).narrow(0, 0, buffer.saved_bytes.numel()).copy_(buffer.saved_bytes);
    buffer.saved_bytes.reset();
  }
}

// Tensors that the function made without an op (from_blob, a number as a tensor) and that only the tracer references
// now: constants of the program, not variables that the function captured.
void Tracer::keep_temporary_tensors() {
  std::vector<char> written(buffers_.size(), 0);
  for (const auto& node : program_.nodes)
    node.each_write([&](ValueId id) { written[static_cast<size_t>(program_.buffer_of(id))] = 1; });
  for (auto& input : program_.inputs) {
    const auto b = static_cast<size_t>(program_.buffer_of(input.value));
    auto& owner = buffers_[b].owner;
    if (input.role != Role::Captured || input.name.starts_with("constant ") || !owner.defined() || is_dtensor(owner))
      continue;
    const auto before = std::find_if(inputs_before_.begin(), inputs_before_.end(),
                                     [&](const InputBefore& each) { return each.tensor.is_same(owner); });
    if (before == inputs_before_.end() || owner.use_count() > 2) continue;
    TESSERA_CHECK(!written[b], UsageError, "compile: the step makes a tensor of shape ", owner.sizes(),
                  " without an op (from_blob, for example) and writes to it; clone() it first");
    input.name = c10::str("constant ", input.value);
    if (!before->copy.defined()) continue;
    before->tensor = owner =
        before->copy.view(owner.scalar_type()).as_strided(owner.sizes(), owner.strides(), owner.storage_offset());
    buffers_[b].weak = owner.storage().getWeakStorageImpl();
  }
}

}  // namespace tessera::compiler
