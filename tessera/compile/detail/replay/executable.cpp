#include "tessera/compile/detail/replay/executable.h"

#include "tessera/base/error.h"
#include "tessera/tracing/op_mode.h"
#include "tessera/compile/detail/codegen/cpp_kernel.h"
#include "tessera/compile/detail/ir/collective.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/ir/print.h"
#include "tessera/compile/detail/replay/boxing.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>

#include <sstream>

namespace tessera::compiler {
namespace {

c10::Storage storage_of(int64_t bytes, c10::Device device) {
  auto* allocator = c10::GetAllocator(device.type());
  return c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes),
                      allocator->allocate(static_cast<size_t>(bytes)), allocator, true);
}

c10::DeviceType device_of(const Program& program, const Node& node) {
  auto device = c10::kCPU;
  const auto look = [&](ValueId id) {
    if (!program[id].type.device.is_cpu()) device = program[id].type.device.type();
  };
  node.each_read(look);
  node.each_result(look);
  return device;
}

bool all_tensors(const Node& node) {
  for (const auto& result : node.results)
    if (!std::holds_alternative<ValueId>(result) || std::get<ValueId>(result) == kNone) return false;
  return !node.results.empty();
}

}  // namespace

Executable::Executable(Program program, const std::vector<c10::Storage>& bound, const MakeRunner& make_runner)
    : program_(std::move(program)),
      library_(program_.kernels.empty() ? nullptr : codegen::Library::load(program_.kernels)),
      storages_(static_cast<size_t>(program_.buffers)),
      tensors_(program_.values.size()),
      values_in_(static_cast<size_t>(program_.buffers)),
      returned_(static_cast<size_t>(program_.buffers), 0),
      bytes_(program_.buffer_bytes()) {
  for (size_t b = 0; b < storages_.size() && b < bound.size(); b++) storages_[b] = bound[b];
  for (const auto& input : program_.inputs)
    if (input.constant.defined())
      storages_[static_cast<size_t>(program_.buffer_of(input.value))] = input.constant.storage();
  if (make_runner) runner_ = make_runner(program_);
  prepare();
}

Executable::~Executable() = default;

void Executable::prepare() {
  const at::AutoDispatchBelowADInplaceOrView below;
  std::vector<char> elsewhere(storages_.size(), 0);
  for (size_t b = 0; b < storages_.size(); b++) elsewhere[b] = static_cast<bool>(storages_[b]);
  const auto external = program_.external_buffers();
  for (const auto& output : program_.outputs) {
    if (output.value == kNone) continue;
    const auto b = static_cast<size_t>(program_.buffer_of(output.value));
    elsewhere[b] = 1;
    returned_[b] |= output.kind == Output::Kind::Return && !external[b] && !storages_[b];
  }
  // Ops without an out= form bring their memory along.
  for (const auto& node : program_.nodes) {
    if (is_view(program_, node) || node.schema().is_mutable() || kind_of(node) == OpKind::Empty) continue;
    if (all_tensors(node) && out_form(node.op, device_of(program_, node))) continue;
    node.each_result([&](ValueId id) { elsewhere[static_cast<size_t>(program_.buffer_of(id))] = 1; });
  }
  if (runner_) elsewhere.assign(elsewhere.size(), 1);
  plan_ = plan_memory(program_, elsewhere);
  const auto used = used_buffers();
  std::vector<c10::Device> devices(storages_.size(), c10::kCPU);
  for (const auto& value : program_.values) devices[static_cast<size_t>(value.buffer)] = value.type.device;
  arena_ = at::empty({plan_.arena_bytes}, at::kByte);
  for (size_t b = 0; b < storages_.size(); b++) {
    if (storages_[b]) continue;
    if (plan_.offsets[b] != MemoryPlan::kElsewhere && devices[b].is_cpu()) {
      auto* begin = static_cast<char*>(arena_.data_ptr()) + plan_.offsets[b];
      storages_[b] = c10::Storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(bytes_[b]),
                                  c10::DataPtr(begin, c10::kCPU), nullptr, false);
    } else {
      storages_[b] = storage_of(used[b] ? bytes_[b] : 0, devices[b]);
    }
  }
  for (size_t v = 0; v < tensors_.size(); v++) {
    values_in_[static_cast<size_t>(program_.values[v].buffer)].push_back(static_cast<ValueId>(v));
    tensors_[v] = tensor_for(static_cast<ValueId>(v));
  }
  if (runner_) return;
  for (size_t n = 0; n < program_.nodes.size(); n++) prepare_step(n, program_.nodes[n]);
  std::vector<char> seen = external;
  for (auto& step : steps_) {
    const auto see = [&](ValueId id) {
      const auto b = static_cast<size_t>(program_.buffer_of(id));
      if (returned_[b] && !seen[b]) step.fresh.push_back(static_cast<int32_t>(b));
      seen[b] = 1;
    };
    program_.nodes[step.node].each_read(see);  // memory that an op made and this one fills
    program_.nodes[step.node].each_result(see);
  }
}

// Passes leave values behind that nothing defines any more.
std::vector<char> Executable::used_buffers() const {
  std::vector<char> used(storages_.size(), 0);
  const auto use = [&](ValueId id) { used[static_cast<size_t>(program_.buffer_of(id))] = 1; };
  for (const auto& node : program_.nodes) {
    if (runner_) break;  // has memory of its own
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
  return tensor;
}

void Executable::prepare_step(size_t n, const Node& node) {
  if (is_view(program_, node) || kind_of(node) == OpKind::Empty) return;
  const auto device = device_of(program_, node);
  const bool writes = node.schema().is_mutable();
  std::optional<c10::OperatorHandle> out;
  if (!writes && all_tensors(node)) out = out_form(node.op, device);
  Step step{n, kernel_of(out ? *out : node.op, device)};
  if (is_generated(node)) {
    prepare_generated(step, node);
    steps_.push_back(std::move(step));
    return;
  }
  const auto& arguments = node.schema().arguments();
  for (size_t i = 0; i < node.args.size(); i++) {
    const auto* live = std::get_if<Live>(&node.args[i]);
    if (live) step.live.emplace_back(i, *live);
    step.kernel.arguments.push_back(live ? c10::IValue() : boxed(program_, node.args[i], arguments[i], tensors_));
  }
  if (out) {
    for (const auto& result : node.results)
      step.kernel.arguments.emplace_back(tensors_[static_cast<size_t>(std::get<ValueId>(result))]);
  } else if (!writes) {
    // What is pending is known by its storage; what is returned must not share one with the next run's.
    step.moves_storage = kind_of(node) == OpKind::Collective;
    node.each_result(
        [&](ValueId id) { step.moves_storage |= returned_[static_cast<size_t>(program_.buffer_of(id))] != 0; });
    int64_t flat = 0;
    for (size_t i = 0; i < node.results.size(); i++) {
      if (const auto* id = std::get_if<ValueId>(&node.results[i])) {
        if (*id != kNone) step.moved.emplace_back(i, *id);
      } else if (const auto* list = std::get_if<ValueList>(&node.results[i])) {
        flat = 0;
        for (const auto id : *list) {
          if (id != kNone) step.moved_lists.push_back({i, flat, id});
          flat++;
        }
      }
    }
  }
  steps_.push_back(std::move(step));
}

void Executable::prepare_generated(Step& step, const Node& node) const {
  step.generated = library_->function(generated_name(node));
  step.operands = std::get<ValueList>(node.args[0]);
  step.outs = step.operands.size();
  for (const auto id : step.operands) step.elements += program_[id].type.numel();
  const auto& ins = std::get<ValueList>(node.args[1]);
  step.operands.insert(step.operands.end(), ins.begin(), ins.end());
}

// Where memory lies can change from run to run.
void Executable::call_generated(const Step& step) {
  operands_.clear();
  for (size_t i = 0; i < step.operands.size(); i++) {
    auto* impl = tensors_[static_cast<size_t>(step.operands[i])].unsafeGetTensorImpl();
    operands_.push_back(i < step.outs ? impl->mutable_data() : const_cast<void*>(impl->data()));
  }
  codegen::call(step.generated, operands_.data(), step.elements);
}

void Executable::bind(int32_t buffer, const c10::Storage& storage, int64_t shift) {
  storages_[static_cast<size_t>(buffer)] = storage;
  for (const auto id : values_in_[static_cast<size_t>(buffer)]) {
    auto* impl = tensors_[static_cast<size_t>(id)].unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(storage);
    impl->set_storage_offset(program_[id].offset + shift);
  }
}

void Executable::give_new_memory(int32_t buffer) {
  const auto& old = storages_[static_cast<size_t>(buffer)];
  bind(buffer, storage_of(bytes_[static_cast<size_t>(buffer)], old.device()), 0);
}

// What a kernel has made becomes the memory of the value: those who read it have it in their arguments already.
void Executable::move_in(const at::Tensor& made, ValueId id, bool whole) {
  const auto& value = program_[id];
  auto* impl = made.unsafeGetTensorImpl();
  const bool lies_right =
      impl->storage_offset() == value.offset && impl->strides() == c10::IntArrayRef(value.type.strides);
  if (C10_UNLIKELY(!lies_right)) {
    tensors_[static_cast<size_t>(id)].copy_(made);
  } else if (whole) {
    bind(value.buffer, made.storage(), 0);
  } else {
    const auto bytes = [](const c10::Storage& storage) -> c10::DataPtr& {
      return const_cast<c10::DataPtr&>(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks());
    };
    std::swap(bytes(storages_[static_cast<size_t>(value.buffer)]), bytes(impl->storage()));
  }
}

// What is put out is copied to where it is looked for: others have a tensor of that memory.
void Executable::run_by_other() {
  Tensors inputs;
  for (const auto& input : program_.inputs) inputs.push_back(tensors_[static_cast<size_t>(input.value)]);
  const auto outputs = runner_(inputs);
  TESSERA_CHECK(outputs.size() == program_.outputs.size(), UsageError, "the program's runner gave ", outputs.size(),
                " outputs; the program has ", program_.outputs.size());
  for (size_t b = 0; b < returned_.size(); b++)
    if (returned_[b]) give_new_memory(static_cast<int32_t>(b));
  const at::AutoDispatchBelowADInplaceOrView below;
  for (size_t i = 0; i < outputs.size(); i++) {
    const auto id = program_.outputs[i].value;
    if (id == kNone) continue;
    const auto& to = tensors_[static_cast<size_t>(id)];
    TESSERA_CHECK(outputs[i].defined() && outputs[i].sizes() == to.sizes(), UsageError, "the program's runner gave ",
                  outputs[i].defined() ? c10::str("a tensor of shape ", outputs[i].sizes()) : "no tensor",
                  " for output ", i, ", which is of shape ", to.sizes());
    if (!outputs[i].is_alias_of(to)) to.copy_(outputs[i]);
  }
  runs_++;
}

void Executable::run() {
  if (runner_) return run_by_other();
  const OpModesOff only_the_program;  // what its kernels call is theirs
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::NoGradGuard no_grad;
  numbers_.clear();
  for (const auto& number : program_.numbers) numbers_.push_back(number.read());
  for (auto& step : steps_) {
    for (const auto buffer : step.fresh) give_new_memory(buffer);
    if (step.generated) {
      call_generated(step);
      step.runs++;
      continue;
    }
    for (const auto& [i, live] : step.live) step.kernel.arguments[i] = number_of(live, numbers_);
    step.kernel.call(stack_);
    for (const auto& [i, id] : step.moved) move_in(stack_[i].toTensor(), id, step.moves_storage);
    for (const auto& [i, at, id] : step.moved_lists)
      move_in(stack_[i].toTensorList()[static_cast<size_t>(at)], id, step.moves_storage);
    step.runs++;
  }
  stack_.clear();
  runs_++;
}

at::Tensor Executable::output(const Output& output) const {
  return output.value == kNone ? at::Tensor() : tensor_for(output.value);
}

std::string Executable::listing() const {
  std::ostringstream out;
  auto step = steps_.begin();
  for (size_t n = 0; n < program_.nodes.size(); n++) {
    const auto& node = program_.nodes[n];
    std::ostringstream line;
    print_node(line, program_, node);
    auto text = line.str();
    if (is_generated(node)) {  // by the function's name
      const auto& name = generated_name(node);
      text.replace(text.find(", \"" + name + "\""), name.size() + 4, "");
      text.replace(0, node.name().size(), name);
    } else if (const auto* row = row_of(node); row && row->listed_as) {
      const auto at = text.find(node.name() + "(");
      text.replace(at, node.name().size(), row->listed_as);
    }
    out << text;
    if (step != steps_.end() && step->node == n) {
      out << "  # ";
      if (kind_of(node) == OpKind::Collective) out << collective_of(program_, node).bytes << " bytes, ";
      out << "ran " << (step++)->runs;
    }
    out << "\n";
  }
  return out.str();
}

}  // namespace tessera::compiler
