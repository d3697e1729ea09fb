#include "tessera/compile/detail/trace/tracer.h"

#include "tessera/base/detail/module_name.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/trace/collective_placeholder.h"
#include "tessera/compile/detail/trace/thread_ranks.h"
#include "tessera/dtensor/detail/meta.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/enum_tag.h>
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

const at::Generator& generator_of(const torch::jit::Stack& stack, size_t arguments) {
  static thread_local at::Generator found;
  found = at::detail::getDefaultCPUGenerator();
  for (const auto& value : torch::jit::last(stack, arguments))
    if (value.isGenerator()) found = value.toGenerator();
  return found;
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

Tracer::Tracer(const std::vector<Lifted>& lifted, RuntimeScalars scalars, const std::vector<at::Generator>& generators)
    : scalars_(std::move(scalars)), generators_(generators) {
  for (const auto& each : lifted)
    if (each.tensor.defined() && local_or_self(each.tensor).has_storage()) {
      const auto& local = local_or_self(each.tensor);
      const auto noted = inputs_before_.size();
      const auto value = input(local, each.role, each.name);
      if (inputs_before_.size() == noted) note_input(local, each.role, each.name);
      auto& buffer = buffers_[static_cast<size_t>(program_.buffer_of(value))];
      if (!buffer.owner.defined() || buffer.owner.is_same(local)) buffer.owner = each.tensor;
    }
  // Memory of arguments may be read by other threads meanwhile, through other tensors.
  for (auto& buffer : buffers_) {
    const bool argument = std::any_of(lifted.begin(), lifted.end(), [&](const Lifted& each) {
      return each.role == Role::Argument && each.tensor.defined() && each.tensor.is_same(buffer.owner);
    });
    buffer.protect = argument && !ranks_are_threads() && local_or_self(buffer.owner).storage().use_count() <= 2;
  }
  for (size_t b = 0; b < buffers_.size(); b++) set_protected(static_cast<int32_t>(b), true);
}

Tracer::~Tracer() { allow_memory_access(); }

Tracer::ValueKey Tracer::key_of(int32_t buffer, const at::Tensor& t) {
  return {buffer, t.storage_offset(), t.sizes().vec(), t.strides().vec(), t.scalar_type(), t.is_conj(), t.is_neg()};
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
  if (added) note_input(t, role, name);
  return value;
}

void Tracer::check_strided(const at::Tensor& t) {
  if (t.layout() == c10::kStrided && t.has_storage()) return;
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  TESSERA_FAIL(UsageError, "compile: a tensor of layout ", t.layout(), in_module(), " cannot be traced; ",
               in_backward
                   ? "backward computed a sparse gradient: set sparse(false) in the options of nn::Embedding or "
                     "nn::EmbeddingBag"
                   : "convert it to a strided tensor outside of the step");
}

Arg Tracer::read_tensor(const at::Tensor& t, Role role) {
  if (!t.defined()) return kNone;
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
    const OpModesOff off;
    const auto number = t.item();
    return number.isFloatingPoint() ? c10::IValue(number.toDouble()) : c10::IValue(number);
  }
  check_strided(t);
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
  if (value.isGenerator() && value.toGenerator() == at::detail::getDefaultCPUGenerator()) return c10::IValue();
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
  check_strided(t);
  const auto* storage = t.storage().unsafeGetStorageImpl();
  const auto [found, added] = buffer_ids_.try_emplace(storage, static_cast<int32_t>(buffers_.size()));
  if (added) {
    buffers_.push_back({.weak = t.storage().getWeakStorageImpl(), .used = true, .constant = true});
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

void Tracer::function_returned() {
  for (const auto& generator : generators_.generators()) record_seed(generator);
  allow_memory_access();
}

void Tracer::record_seed(const at::Generator& generator) {
  const auto state = generators_.set_on_host(generator);
  if (!state) return;
  const auto value = input(*state, Role::Captured, c10::str("constant ", program_.inputs.size()));
  const bool by_default = generator == at::detail::getDefaultCPUGenerator();
  program_.nodes.push_back({find_op("tessera.set_rng_state"),
                            {value, by_default ? c10::IValue() : c10::IValue(generator)},
                            {},
                            running_module()});
}

// torch::equal() of a tensor with itself, or of tensors of different sizes, has one answer. Otherwise the program
// checks in each run that the answer is the same. Different tensors that depend on collectives are taken for unequal.
bool Tracer::equal(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto a = torch::jit::peek(*stack, 0, 2).toTensor(), b = torch::jit::peek(*stack, 1, 2).toTensor();
  Node node{find_op("tessera.check_equal"),
            {read_tensor(a, Role::Captured), read_tensor(b, Role::Captured)},
            {},
            running_module()};
  const auto *x = std::get_if<ValueId>(&node.args[0]), *y = std::get_if<ValueId>(&node.args[1]);
  const bool same_memory = x && y && program_.buffer_of(*x) == program_.buffer_of(*y) &&
                           program_[*x].type == program_[*y].type && program_[*x].offset == program_[*y].offset;
  if (same_memory) {
    torch::jit::drop(*stack, 2);
    return true;
  }
  keep_numbers_from_host(op, node.args);
  const bool is_flag = a.dim() == 0 && a.scalar_type() == at::kBool;  // a check of a composite op, as in cov()
  if (any_unknown(node) && !is_flag) {
    // Placeholders are all zeros, and so would be what is computed of them.
    torch::jit::drop(*stack, 2);
    stack->emplace_back(false);
  } else {
    set_protected(node, false);
    next(op, keys, stack);
    set_protected(node, true);
  }
  const bool answer = torch::jit::pop(*stack).toBool();
  if (a.sizes() != b.sizes()) return answer;
  node.args.emplace_back(c10::IValue(answer));
  program_.nodes.push_back(std::move(node));
  return answer;
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
  // A tensor of zeros without memory (the gradient of sgn). Only the dispatcher knows that key, and a replay has none.
  if (op.operator_name().name == "aten::_efficientzerotensor") {
    static const auto zeros = c10::Dispatcher::singleton().findSchemaOrThrow("aten::zeros", "");
    return zeros.callBoxed(stack);
  }
  if (op.operator_name().name == "aten::_linalg_check_errors") return check_errors_at_run(op, stack);
  // An op on DTensors calls ops on local tensors, which are recorded.
  if (keys.has_backend(c10::BackendComponent::PrivateUse3Bit)) return next(op, keys, stack);
  auto kind = kind_of(op);
  if (op.operator_name().name == "aten::equal") return torch::jit::push(*stack, equal(op, keys, stack));
  if (kind == OpKind::Reads && has_fixed_sizes(op, *stack)) kind = OpKind::Plain;
  if (kind == OpKind::Reads && read_on_host(op, keys, stack)) return;
  TESSERA_CHECK(kind != OpKind::Reads, UsageError, "compile: ", op.operator_name(), in_module(),
                " depends on values, but a compiled step cannot read values on the host: ",
                op.operator_name().name == "aten::index" || op.operator_name().name == "aten::nonzero"
                    ? "instead of a mask as an index use torch::where, or integer indices"
                    : "keep the number in a tensor, or compute it outside of the step");
  const auto& schema = op.schema();
  const bool draws = kind == OpKind::Random && !op.operator_name().name.starts_with("tessera::philox_");
  if (draws) record_seed(generator_of(*stack, schema.arguments().size()));
  const auto begin = stack->size() - schema.arguments().size();
  Node node{op, {}, {}, running_module()};
  node.args.reserve(schema.arguments().size());
  for (size_t i = 0; i < schema.arguments().size(); i++) node.args.push_back(read((*stack)[begin + i], op, i));
  const auto generator = draws ? generator_of(*stack, schema.arguments().size()) : at::Generator();
  set_protected(node, false);
  keep_numbers_from_host(op, node.args);
  {
    const OpModesOff off;
    save_before_write(node);
  }
  if (kind == OpKind::Collective || kind == OpKind::Wait) {
    push_collective_placeholder(op, stack);
  } else {
    if (any_unknown(node)) replace_rejected_values(node, *stack);
    next(op, keys, stack);
  }
  if (draws) generators_.drew(generator);
  if (op.operator_name().name == "tessera::philox_seed_generator")
    generators_.drew(std::get<c10::IValue>(node.args[0]).toGenerator());  // each run seeds it
  // squeeze_, t_, ... change sizes and strides but write no memory: recorded as squeeze, t, ...
  if (const auto view = view_of_in_place_view(op)) node.op = *view;
  const auto first = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); i++) node.results.push_back(define((*stack)[first + i]));
  node.each_result([&](ValueId id) {
    auto& buffer = buffers_[static_cast<size_t>(program_.buffer_of(id))];
    if (buffer.external) return;
    if (kind == OpKind::Empty) {
      buffer.unwritten = true;
      if (const auto storage = buffer.weak.lock(); storage && storage->nbytes() > 0 && storage->device().is_cpu())
        std::memset(storage->mutable_data(), 0, storage->nbytes());  // traces of one step have the same constants
    } else if (!buffer.unwritten) {
      buffer.protect = op.operator_name().name != "tessera::rng_state";  // activation checkpointing compares states
    }
  });
  note_values(node, kind);
  set_protected(node, true);
  program_.nodes.push_back(std::move(node));
}

bool Tracer::any_unknown(const Node& node) const {
  bool found = false;
  node.each_read([&](ValueId id) { found |= buffers_[static_cast<size_t>(program_.buffer_of(id))].unknown; });
  return found;
}

bool Tracer::all_constant(const Node& node) const {
  bool all = true;
  for (const auto& arg : node.args)
    all &= !std::holds_alternative<RuntimeScalar>(arg) && !std::holds_alternative<GroupName>(arg);
  node.each_read([&](ValueId id) { all &= buffers_[static_cast<size_t>(program_.buffer_of(id))].constant; });
  return all;
}

void Tracer::note_values(const Node& node, OpKind kind) {
  const bool unknown = kind == OpKind::Collective || any_unknown(node);
  const bool constant = (kind == OpKind::Plain || kind == OpKind::Empty) && all_constant(node);
  const auto note = [&](ValueId id) {
    auto& buffer = buffers_[static_cast<size_t>(program_.buffer_of(id))];
    buffer.unknown |= unknown;
    buffer.constant &= constant;
  };
  node.each_result(note);
  node.each_write(note);
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

std::vector<at::Tensor> Tracer::captured() const {
  std::vector<at::Tensor> all;
  for (const auto& input : program_.inputs) {
    const auto& owner = buffers_[static_cast<size_t>(program_.buffer_of(input.value))].owner;
    if (input.role == Role::Captured && !input.name.starts_with("constant ") && owner.defined() &&
        !owner.requires_grad() && !is_dtensor(owner))
      all.push_back(owner);
  }
  return all;
}

Tracer::Result Tracer::finish() {
  keep_temporary_tensors();
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
  note_reads_of_storage(result, buffers_.size());
  return result;
}

void Tracer::note_reads_of_storage(Result& result, size_t buffers) {
  const auto& program = result.program;
  result.reads_by_offset.assign(buffers, 0);
  result.reads_outside.assign(buffers, 0);
  for (const auto& node : program.nodes) {
    if (!node.name().starts_with("aten.as_strided")) continue;
    const auto* self = std::get_if<ValueId>(&node.args[0]);
    const auto* offset = std::get_if<c10::IValue>(&node.args.back());
    if (self && offset && offset->isInt()) result.reads_by_offset[static_cast<size_t>(program.buffer_of(*self))] = 1;
  }
  const auto begin_and_end = [&](const Input& input) {
    const auto& value = program[input.value];
    return std::pair(value.offset, value.offset + value.type.span());
  };
  std::unordered_map<int32_t, std::pair<int64_t, int64_t>> arguments;  // elements by buffer
  for (const auto& input : program.inputs) {
    if (input.role != Role::Argument) continue;
    const auto found = begin_and_end(input);
    const auto [argument, is_first] = arguments.try_emplace(program.buffer_of(input.value), found);
    auto& [begin, end] = argument->second;
    if (is_first) continue;
    if (!input.name.starts_with("captured "))
      begin = std::min(begin, found.first), end = std::max(end, found.second);
    else if (found.first < begin || found.second > end)
      result.reads_outside[static_cast<size_t>(argument->first)] = 1;
  }
}

}  // namespace tessera::compiler
