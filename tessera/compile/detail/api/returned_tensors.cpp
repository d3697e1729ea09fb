#include "tessera/compile/detail/api/returned_tensors.h"

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

template <class VersionOf>
ReturnedTensors::Base ReturnedTensors::find(size_t i, const Tensors& fixed, const CallArguments& arguments,
                                            const VersionOf& version_of, const void* Item::*version) const {
  const auto* wanted = items_[i].*version;
  if (!wanted) return {};
  for (size_t a = 0; a < arguments.tensors.size(); a++)
    if (version_of(arguments.tensors[a]) == wanted) return {static_cast<int>(a)};
  for (const auto& t : fixed)
    if (version_of(t) == wanted) return {-1, -1, t};
  for (size_t j = 0; j < i; j++)
    if (items_[j].*version == wanted) return {-1, static_cast<int>(j)};
  return {};
}

void ReturnedTensors::find_bases(const CallArguments& arguments, const Tensors& owners) {
  auto fixed = owners;
  for (const auto& each : lift(arguments))
    if (each.role != Role::Gradient && each.role != Role::Argument) fixed.push_back(each.tensor);
  for (size_t i = 0; i < items_.size(); i++) {
    auto& item = items_[i];
    if (!item.defined) continue;
    // An inference tensor has no counter: only the object itself can be found.
    for (size_t a = 0; a < arguments.tensors.size() && !item.is_base; a++)
      if (arguments.tensors[a].defined() && arguments.tensors[a].unsafeGetTensorImpl() == item.tensor)
        item.base = {static_cast<int>(a)}, item.is_base = true;
    for (size_t f = 0; f < fixed.size() && !item.is_base; f++)
      if (fixed[f].defined() && fixed[f].unsafeGetTensorImpl() == item.tensor)
        item.base = {-1, -1, fixed[f]}, item.is_base = true;
    for (size_t j = 0; j < i && !item.is_base; j++)
      if (items_[j].tensor == item.tensor) item.base = {-1, static_cast<int>(j)}, item.is_base = true;
    if (item.is_base) continue;
    item.base = find(i, fixed, arguments, version_of, &Item::version);
    if (item.spec) item.local_base = find(i, fixed, arguments, local_version_of, &Item::local_version);
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
