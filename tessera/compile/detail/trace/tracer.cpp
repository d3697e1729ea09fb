#include "tessera/compile/detail/trace/tracer.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/trace/collective_placeholder.h"
#include "tessera/dtensor/detail/meta.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/custom_class.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

bool is_communicator(const c10::IValue& value) {
  return value.isObject() &&
         value.type().get() == c10::getCustomClassType<c10::intrusive_ptr<comm::Communicator>>().get();
}

// A byte tensor over all of a storage.
at::Tensor storage_as_bytes(const c10::intrusive_ptr<c10::StorageImpl>& storage) {
  const auto size = static_cast<int64_t>(storage->nbytes());
  return at::empty({0}, at::TensorOptions(at::kByte).device(storage->device()))
      .set_(c10::Storage(storage), 0, {size}, {1});
}

// aten::squeeze_ -> aten::squeeze: the view op of an op that changes the sizes of its argument in place.
std::optional<c10::OperatorHandle> view_of_in_place_view(const c10::OperatorHandle& op) {
  const auto tags = op.getTags();
  if (std::find(tags.begin(), tags.end(), at::Tag::inplace_view) == tags.end()) return {};
  auto name = op.operator_name().name;
  if (name.empty() || name.back() != '_') return {};
  name.pop_back();
  const auto view = c10::Dispatcher::singleton().findSchema({name, op.operator_name().overload_name});
  if (!view || view->schema().returns().size() != 1) return {};
  const auto* alias = view->schema().returns()[0].alias_info();
  return alias && !alias->isWrite() ? view : std::nullopt;
}

}  // namespace

Tracer::Tracer(const std::vector<Lifted>& lifted, RuntimeScalars scalars) : scalars_(std::move(scalars)) {
  for (const auto& each : lifted)
    if (each.tensor.defined() && local_or_self(each.tensor).has_storage()) {
      const auto& local = local_or_self(each.tensor);
      const auto value = input(local, each.role, each.name);
      auto& buffer = buffers_[static_cast<size_t>(program_.buffer_of(value))];
      if (!buffer.owner.defined() || buffer.owner.is_same(local)) buffer.owner = each.tensor;
    }
}

Tracer::~Tracer() = default;

Tracer::ValueKey Tracer::key_of(int32_t buffer, const at::Tensor& t) {
  return {buffer, t.storage_offset(), t.sizes().vec(), t.strides().vec(), t.scalar_type()};
}

// Adds an external buffer, unless it is known, and an input for this view of it.
ValueId Tracer::input(const at::Tensor& t, Role role, const std::string& name) {
  const auto* storage = t.storage().unsafeGetStorageImpl();
  const auto [found, added] = buffer_ids_.try_emplace(storage, static_cast<int32_t>(buffers_.size()));
  if (added) {
    buffers_.push_back({.weak = t.storage().getWeakStorageImpl(), .owner = t, .external = true});
    program_.buffers++;
  }
  auto& value = values_.try_emplace(key_of(found->second, t), kNone).first->second;
  if (value != kNone) return value;
  program_.values.push_back({Type::of(t), found->second, t.storage_offset()});
  value = static_cast<ValueId>(program_.values.size() - 1);
  program_.inputs.push_back({value, role, name});
  return value;
}

Arg Tracer::read_tensor(const at::Tensor& t, Role role) {
  if (!t.defined()) return kNone;
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
    const OpModesOff off;
    const auto number = t.item();
    return number.isFloatingPoint() ? c10::IValue(number.toDouble()) : c10::IValue(number);
  }
  TESSERA_CHECK(t.has_storage() && t.layout() == c10::kStrided, UsageError, "compile: a tensor of layout ", t.layout(),
                in_module(), " cannot be traced; convert it to a strided tensor outside of the step");
  const auto known = buffer_ids_.find(t.storage().unsafeGetStorageImpl());
  if (known != buffer_ids_.end()) {
    buffers_[static_cast<size_t>(known->second)].used = true;
    const auto found = values_.find(key_of(known->second, t));
    if (found != values_.end()) return found->second;
    // A view that no op returned, for example one by set_data.
    if (!buffers_[static_cast<size_t>(known->second)].external) {
      program_.values.push_back({Type::of(t), known->second, t.storage_offset()});
      const auto value = static_cast<ValueId>(program_.values.size() - 1);
      values_[key_of(known->second, t)] = value;
      const auto base = first_value_in(known->second);
      program_.nodes.push_back(
          {find_op("aten.as_strided"),
           {base, c10::IValue(t.sizes()), c10::IValue(t.strides()), c10::IValue(t.storage_offset())},
           {value}});
      return value;
    }
    for (const auto& each : program_.inputs)
      if (program_.buffer_of(each.value) == known->second) role = each.role;
  }
  const auto value = input(t, role, c10::str("captured ", program_.inputs.size()));
  buffers_[static_cast<size_t>(program_.buffer_of(value))].used = true;
  return value;
}

ValueId Tracer::first_value_in(int32_t buffer) const {
  for (size_t v = 0; v < program_.values.size(); v++)
    if (program_.values[v].buffer == buffer) return static_cast<ValueId>(v);
  return kNone;
}

Arg Tracer::group(const comm::Group& group) {
  for (size_t i = 0; i < program_.groups.size(); i++)
    if (program_.groups[i].group == group) return GroupName{static_cast<int32_t>(i)};
  auto name = group->name();
  for (auto& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  for (const auto& other : program_.groups)
    if (other.name == name) name += "_" + std::to_string(program_.groups.size());
  program_.groups.push_back({std::move(name), group->ranks(), group});
  return GroupName{static_cast<int32_t>(program_.groups.size() - 1)};
}

Arg Tracer::read(const c10::IValue& value, const c10::OperatorHandle& op, size_t argument) {
  if (value.isTensor()) return read_tensor(value.toTensor(), Role::Captured);
  if (value.isTensorList()) {
    ValueList list;
    for (const at::Tensor& t : value.toTensorList()) list.push_back(value_in_list(t));
    return list;
  }
  if (value.isList()) {
    const auto items = value.toListRef();
    bool tensors = false;
    for (const auto& item : items) tensors |= item.isTensor();
    if (tensors) {
      ValueList list;
      for (const auto& item : items) list.push_back(item.isTensor() ? value_in_list(item.toTensor()) : kNone);
      return list;
    }
  }
  if (is_communicator(value)) return group(value.toCustomClass<comm::Communicator>());
  if (auto scalar = scalars_.find(program_, op, argument, value)) return *scalar;
  if (value.isGenerator()) return c10::IValue();  // programs use the default generator only
  return value;
}

ValueId Tracer::value_in_list(const at::Tensor& t) {
  const auto arg = read_tensor(t, Role::Captured);
  if (const auto* value = std::get_if<ValueId>(&arg)) return *value;
  // A wrapped number is a tensor in a list.
  return input(t, Role::Captured, c10::str("captured ", program_.inputs.size()));
}

ValueId Tracer::define_tensor(const at::Tensor& t) {
  if (!t.defined()) return kNone;
  const auto* storage = t.storage().unsafeGetStorageImpl();
  const auto [found, added] = buffer_ids_.try_emplace(storage, static_cast<int32_t>(buffers_.size()));
  if (added) {
    buffers_.push_back({.weak = t.storage().getWeakStorageImpl(), .used = true});
    program_.buffers++;
  }
  program_.values.push_back({Type::of(t), found->second, t.storage_offset()});
  const auto value = static_cast<ValueId>(program_.values.size() - 1);
  values_[key_of(found->second, t)] = value;
  return value;
}

Arg Tracer::define(const c10::IValue& value) {
  if (value.isTensor()) return define_tensor(value.toTensor());
  if (!value.isTensorList()) return value;
  ValueList list;
  for (const at::Tensor& t : value.toTensorList()) list.push_back(define_tensor(t));
  return list;
}

void Tracer::save_before_write(const Node& node) {
  node.each_write([&](ValueId id) {
    auto& buffer = buffers_[static_cast<size_t>(program_.buffer_of(id))];
    if (!buffer.external || buffer.saved_bytes.defined()) return;
    buffer.saved_bytes = storage_as_bytes(buffer.weak.lock()).clone();
  });
}

void Tracer::note_leaves(const c10::IValue& argument) {
  if (argument.isTensorList()) {
    for (const at::Tensor& t : argument.toTensorList()) note_leaves(t);
  } else if (argument.isTensor()) {
    const auto& t = argument.toTensor();
    // is_leaf() is also true for views made without grad mode, which backward makes of saved tensors.
    if (t.defined() && t.requires_grad() && t.is_leaf() && !t.is_view() && !was_allocated(local_or_self(t)) &&
        !CompilingScope::is_inner_leaf(t.unsafeGetTensorImpl()) && known_leaves_.insert(t.unsafeGetTensorImpl()).second)
      leaves_.push_back({t, t.grad()});
  }
}

void Tracer::run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // Ops of backward use a saved tensor instead of the leaf itself. The leaf was noted in forward.
  if (torch::autograd::get_current_graph_task_id() == -1)
    for (const auto& argument : torch::jit::last(*stack, op.schema().arguments().size())) note_leaves(argument);
  // An op on DTensors calls ops on local tensors, which are recorded.
  if (keys.has_backend(c10::BackendComponent::PrivateUse3Bit)) return next(op, keys, stack);
  const auto kind = kind_of(op);
  TESSERA_CHECK(kind != OpKind::Reads, UsageError, "compile: ", op.operator_name(), in_module(),
                " depends on values, but a compiled step cannot read values on the host: keep the number in a tensor, "
                "or compute it outside of the step");
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  Node node{op, {}, {}, running_module()};
  node.args.reserve(schema.arguments().size());
  for (size_t i = 0; i < schema.arguments().size(); i++) node.args.push_back(read((*stack)[begin + i], op, i));
  {
    const OpModesOff off;
    save_before_write(node);
  }
  if (kind == OpKind::Collective || kind == OpKind::Wait)
    push_collective_placeholder(op, stack);
  else
    next(op, keys, stack);
  // squeeze_, t_, ... change sizes and strides but write no memory: recorded as squeeze, t, ...
  if (const auto view = view_of_in_place_view(op)) node.op = *view;
  const auto first = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); i++) node.results.push_back(define((*stack)[first + i]));
  program_.nodes.push_back(std::move(node));
}

ValueId Tracer::value_of(const at::Tensor& local) {
  if (!local.defined()) return kNone;
  const auto arg = read_tensor(local, Role::Captured);
  const auto* value = std::get_if<ValueId>(&arg);
  return value ? *value : input(local, Role::Captured, "number");
}

void Tracer::add_output(const at::Tensor& local, Output::Kind kind, std::string name) {
  program_.outputs.push_back({value_of(local), kind, std::move(name)});
}

bool Tracer::was_used(const at::Tensor& local) const {
  const auto found = buffer_ids_.find(local.storage().unsafeGetStorageImpl());
  return found != buffer_ids_.end() && buffers_[static_cast<size_t>(found->second)].used;
}

bool Tracer::was_allocated(const at::Tensor& local) const {
  const auto found = buffer_ids_.find(local.storage().unsafeGetStorageImpl());
  return found != buffer_ids_.end() && !buffers_[static_cast<size_t>(found->second)].external;
}

void Tracer::restore_memory() {
  for (auto& buffer : buffers_) {
    if (!buffer.saved_bytes.defined()) continue;
    if (const auto storage = buffer.weak.lock()) storage_as_bytes(storage).copy_(buffer.saved_bytes);
    buffer.saved_bytes.reset();
  }
}

Tracer::Result Tracer::finish() {
  Result result;
  std::vector<char> is_output(buffers_.size(), 0);
  for (const auto& output : program_.outputs)
    if (output.value != kNone) is_output[static_cast<size_t>(program_.buffer_of(output.value))] = 1;
  for (size_t b = 0; b < buffers_.size(); b++) {
    auto& buffer = buffers_[b];
    auto storage = buffer.weak.lock();
    if (!buffer.external && storage && !is_output[b])
      program_.outputs.push_back({first_value_in(static_cast<int32_t>(b)), Output::Kind::Kept});
    result.storages.emplace_back(std::move(storage));
    result.owners.push_back(buffer.external ? std::move(buffer.owner) : at::Tensor());
  }
  result.program = std::move(program_);
  return result;
}

}  // namespace tessera::compiler
