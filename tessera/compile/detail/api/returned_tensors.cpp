#include "tessera/compile/detail/api/returned_tensors.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/trace/local_tensors.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <cstring>
#include <optional>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;
using torch::autograd::CreationMeta;

// The address of the counter, which views share with their base; null for an inference tensor.
const void* version_of(const at::Tensor& t) {
  if (!t.defined() || t.is_inference()) return nullptr;
  const auto& version = t.unsafeGetTensorImpl()->version_counter();
  const void* counter = nullptr;
  static_assert(sizeof(version) == sizeof(counter));
  std::memcpy(static_cast<void*>(&counter), static_cast<const void*>(&version), sizeof(counter));
  return counter;
}
const void* local_version_of(const at::Tensor& t) { return t.defined() ? version_of(local_or_self(t)) : nullptr; }

void share_version(const at::Tensor& t, const at::Tensor& base) {
  if (base.defined() && !base.is_inference() && !t.is_inference())
    torch::autograd::impl::set_version_counter(t, torch::autograd::impl::version_counter(base));
}

}  // namespace

void ReturnedTensors::add(const at::Tensor& t) {
  Item item;
  item.defined = t.defined();
  if (t.defined()) {
    item.spec = spec_or_null(t);
    item.inference = t.is_inference();
    item.requires_grad = t.requires_grad();
    const auto* view = torch::autograd::impl::get_view_autograd_meta(t);
    item.is_view = view && view->has_bw_view();
    if (item.is_view) item.creation = view->get_creation_meta();
    item.tensor = t.unsafeGetTensorImpl();
    item.version = version_of(t);
    item.local_version = local_version_of(t);
  }
  items_.push_back(std::move(item));
}

ReturnedTensors::ReturnedTensors(const std::vector<Saved>& saved) {
  for (const auto& each : saved) {
    Item item;
    item.defined = each.defined, item.inference = each.inference, item.requires_grad = each.requires_grad;
    item.is_view = each.is_view, item.is_base = each.is_base, item.creation = each.creation;
    item.base = {each.argument, each.result};
    items_.push_back(std::move(item));
  }
}

std::vector<ReturnedTensors::Saved> ReturnedTensors::saved() const {
  std::vector<Saved> all;
  for (const auto& item : items_) {
    TESSERA_CHECK(!item.spec && !item.base.fixed.defined(), UsageError, "save: result ", all.size(), " of the step is ",
                  item.spec ? "distributed" : "a parameter, or a view of one; clone() it");
    all.push_back({item.defined, item.inference, item.requires_grad, item.is_view, item.is_base, item.creation,
                   item.base.argument, item.base.result});
  }
  return all;
}

template <class Matches>
ReturnedTensors::Base ReturnedTensors::find(const Tensors& fixed, const Tensors& arguments, const Matches& matches) {
  for (size_t a = 0; a < arguments.size(); a++)
    if (arguments[a].defined() && matches(arguments[a])) return {static_cast<int>(a)};
  for (const auto& t : fixed)
    if (t.defined() && matches(t)) return {-1, -1, t};
  return {};
}

void ReturnedTensors::find_bases(const CallArguments& arguments, const Tracer::Result& traced) {
  auto fixed = traced.owners;
  for (const auto& each : lift(arguments))
    if (each.role != Role::Gradient && each.role != Role::Argument) fixed.push_back(each.tensor);
  std::vector<const Value*> values;
  for (const auto& output : traced.program.outputs)
    if (output.kind == Output::Kind::Return)
      values.push_back(output.value == kNone ? nullptr : &traced.program[output.value]);
  const auto in_its_memory = [&](size_t i, const at::Tensor& t) {
    const auto& local = local_or_self(t);
    return local.has_storage() && local.storage().unsafeGetStorageImpl() ==
                                      traced.storages[static_cast<size_t>(values[i]->buffer)].unsafeGetStorageImpl();
  };
  for (size_t i = 0; i < items_.size(); i++) {
    auto& item = items_[i];
    if (!item.defined || !values[i]) continue;
    const auto is_same = [&](const at::Tensor& t) {
      return t.unsafeGetTensorImpl() == item.tensor && in_its_memory(i, t) &&
             Type::of(local_or_self(t)) == values[i]->type && local_or_self(t).storage_offset() == values[i]->offset;
    };
    item.base = find(fixed, arguments.tensors, is_same);
    for (size_t j = 0; j < i && !is_found(item.base); j++)
      if (items_[j].tensor == item.tensor && values[j] == values[i]) item.base.result = static_cast<int>(j);
    item.is_base = is_found(item.base);
    if (item.is_base) continue;
    item.base = find(fixed, arguments.tensors, [&](const at::Tensor& t) {
      return item.version && version_of(t) == item.version && in_its_memory(i, t);
    });
    if (item.spec)
      item.local_base = find(fixed, arguments.tensors, [&](const at::Tensor& t) {
        return item.local_version && local_version_of(t) == item.local_version && in_its_memory(i, t);
      });
    for (size_t j = 0; j < i; j++) {
      if (!values[j] || values[j]->buffer != values[i]->buffer) continue;
      const auto result = static_cast<int>(j);
      if (!is_found(item.base) && item.version && items_[j].version == item.version) item.base.result = result;
      if (!is_found(item.local_base) && item.spec && item.local_version &&
          items_[j].local_version == item.local_version)
        item.local_base.result = result;
    }
    // Two views of a tensor that was not returned: neither is the base of the other.
    if (item.base.result >= 0 && items_[static_cast<size_t>(item.base.result)].is_view) item.is_view = false;
  }
}

at::Tensor ReturnedTensors::tensor_of(const Base& base, const CallArguments& arguments, const Tensors& earlier) {
  if (base.argument >= 0) return arguments.tensors[static_cast<size_t>(base.argument)];
  return base.result >= 0 ? earlier[static_cast<size_t>(base.result)] : base.fixed;
}

at::Tensor ReturnedTensors::next(const Executable& executable, const Output& output, const CallArguments& arguments,
                                 const Tensors& earlier, bool has_graph) const {
  const auto& item = items_[earlier.size()];
  if (output.value == kNone) return {};
  const auto base = tensor_of(item.base, arguments, earlier);
  if (item.is_base && (!item.requires_grad || item.base.result >= 0)) return base;
  std::optional<c10::InferenceMode> mode;
  if (item.inference != c10::InferenceMode::is_enabled()) mode.emplace(item.inference);
  auto local = executable.output(output);
  if (!item.spec) {
    share_version(local, base);
  } else {
    const auto local_base = item.is_base ? base : tensor_of(item.local_base, arguments, earlier);
    if (local_base.defined()) share_version(local, local_or_self(local_base));
  }
  auto t = wrap_with_spec(std::move(local), item.spec);
  if (item.spec) share_version(t, base);
  const bool is_view = item.is_view || item.is_base;
  if (!is_view || !base.defined() || base.is_inference() || item.inference || (item.requires_grad && !has_graph) ||
      torch::autograd::impl::get_autograd_meta(t))
    return t;
  return torch::autograd::as_view(base, t, true, true, nullptr, nullptr,
                                  item.requires_grad ? CreationMeta::IN_CUSTOM_FUNCTION : item.creation);
}

}  // namespace tessera::compiler
