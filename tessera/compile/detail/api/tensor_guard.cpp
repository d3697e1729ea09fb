#include "tessera/compile/detail/api/tensor_guard.h"

#include "tessera/base/detail/hash.h"
#include "tessera/compile/detail/ir/type.h"
#include "tessera/dtensor/detail/meta.h"

#include <malloc.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

// A hook that replaces another one may get its address, so the bytes of the object count too: its class, and what it
// has captured by value. Not for hooks of the library, which have counters; their owners add guards.
template <class Hook>
size_t hash_of_hook(size_t hash, const Hook& hook) {
  const auto* object = dynamic_cast<const void*>(&hook);
  hash = hash_combine(hash, std::bit_cast<uint64_t>(object));
  if (std::string_view(typeid(hook).name()).starts_with("N7tessera")) return hash;
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): the function does not write
  return hash_combine(hash, hash_bytes(object, malloc_usable_size(const_cast<void*>(object))));
}

// Hooks that the user has registered on the gradient: 0 without hooks, and another number for other hooks. A hook
// that is removed from a tensor leaves its position, so a new one has a position that none had before.
size_t hash_of_hooks(const torch::autograd::AutogradMeta& meta) {
  size_t hash = 0;
  if (meta.post_acc_grad_hooks_) hash = hash_of_hook(1, *meta.post_acc_grad_hooks_);
  if (meta.cpp_hooks_list_)
    for (size_t i = 0; i < meta.cpp_hooks_list_->size(); i++)
      if ((*meta.cpp_hooks_list_)[i]) hash = hash * 31 + i + 2;
  if (meta.grad_accumulator_.expired()) return hash;
  const auto accumulator = meta.grad_accumulator_.lock();
  for (const auto& hook : accumulator->pre_hooks()) hash = hash_of_hook(hash + 1, *hook);
  for (const auto& hook : accumulator->post_hooks()) hash = hash_of_hook(hash + 2, *hook);
  return hash;
}

// What autograd knows of a tensor besides requires_grad.
TensorGuard::Autograd autograd_of(const at::Tensor& t) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(t);
  if (!meta) return {};
  return {hash_of_hooks(*meta), meta->fw_grad_ && !meta->fw_grad_->empty(), meta->retains_grad_, meta->is_view_,
          meta->grad_dtype_.value_or(c10::ScalarType::Undefined)};
}

}  // namespace

TensorGuard::Layout TensorGuard::layout_of(const at::Tensor& t) {
  Layout layout;
  if (t.layout() != c10::kStrided) return layout;
  layout.append(t.sizes().begin(), t.sizes().end());
  layout.append(t.strides().begin(), t.strides().end());
  return layout;
}

TensorGuard::TensorGuard(const at::Tensor& t) {
  auto rest = std::make_shared<Rest>();
  rest->text = describe(t);
  rest_ = rest;
  if (!t.defined()) return;
  keys_ = t.key_set().raw_repr();
  dtype_ = t.dtype();
  requires_grad_ = t.requires_grad();
  autograd_ = autograd_of(t);
  wrapped_number_ = t.unsafeGetTensorImpl()->is_wrapped_number();
  zero_tensor_ = t._is_zerotensor();
  sizes_and_strides_ = layout_of(t);
  device_ = t.device();
  if (const auto* spec = tessera::detail::spec_or_null(t)) {
    distributed_ = true;
    rest->spec = SpecRef::reclaim_copy(spec);
    rest->local_layout = layout_of(local_or_self(t));
  }
}

bool TensorGuard::same_layout(const c10::TensorImpl& impl, const Layout& layout) {
  if (impl.layout() != c10::kStrided) return layout.empty();
  const auto sizes = impl.sizes(), strides = impl.strides();
  const auto bytes = sizes.size() * sizeof(int64_t);
  return layout.size() == 2 * sizes.size() &&
         (bytes == 0 || (std::memcmp(layout.data(), sizes.data(), bytes) == 0 &&
                         std::memcmp(layout.data() + sizes.size(), strides.data(), bytes) == 0));
}

bool TensorGuard::holds(const at::Tensor& t) const {
  if (!t.defined()) return keys_ == 0;
  const auto& impl = *t.unsafeGetTensorImpl();
  if (impl.key_set().raw_repr() != keys_ || impl.dtype() != dtype_ || impl.requires_grad() != requires_grad_ ||
      impl.device() != device_ || !same_layout(impl, sizes_and_strides_) ||
      impl.is_wrapped_number() != wrapped_number_ || autograd_of(t) != autograd_)
    return false;
  if (!distributed_) return true;
  return tessera::detail::spec_or_null(t) == rest_->spec.get() &&
         same_layout(*local_or_self(t).unsafeGetTensorImpl(), rest_->local_layout);
}

bool TensorGuard::add_to(GuardSnapshot& snapshot, const at::Tensor& t) const {
  if (!t.defined()) return true;
  const auto& impl = *t.unsafeGetTensorImpl();
  const auto* begin = reinterpret_cast<const char*>(&impl);
  const auto* end = begin + sizeof(c10::TensorImpl);
  const auto* sizes = reinterpret_cast<const char*>(impl.sizes().data());
  if (distributed_ || impl.layout() != c10::kStrided || sizes < begin || sizes >= end) return false;
  const auto* fields = begin + sizeof(c10::intrusive_ptr_target);  // behind the use count
  snapshot.add(fields, static_cast<size_t>(end - fields));
  const auto* meta = torch::autograd::impl::get_autograd_meta(t);
  if (!meta) return true;
  if (meta->is_view_ || meta->fw_grad_ || meta->cpp_hooks_list_ || meta->post_acc_grad_hooks_ ||
      !meta->grad_accumulator_.expired())
    return false;
  // All that follows the gradient.
  const auto* history = reinterpret_cast<const char*>(&meta->grad_fn_);
  snapshot.add(history, static_cast<size_t>(reinterpret_cast<const char*>(&meta->mutex_) - history));
  return true;
}

std::string TensorGuard::describe(const at::Tensor& t) {
  if (!t.defined()) return "undefined";
  std::ostringstream out;
  if (const auto* spec = tessera::detail::spec_or_null(t))
    out << spec->brief();
  else if (t.layout() == c10::kStrided)
    out << Type::of(t);
  else
    out << t.layout() << " " << t.scalar_type();
  if (t.requires_grad()) out << " that requires a gradient";
  if (t.is_neg()) out << " with its neg bit set";
  if (t.is_conj()) out << " with its conj bit set";
  if (t.is_inference()) out << " of inference mode";
  const auto autograd = autograd_of(t);
  if (autograd.is_view) out << " that is a view";
  if (autograd.hooks) out << " with hooks";
  if (autograd.has_tangent) out << " with a tangent";
  if (t._is_zerotensor()) out << " of zeros without memory";
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) out << " that is a wrapped number";
  return out.str();
}

std::string TensorGuard::difference(const at::Tensor& t) const {
  if (holds(t)) return "";
  const auto now = describe(t), before = keys_ ? rest_->text : "undefined";
  return now == before ? now + " of another kind or layout, or with other hooks" : now + ", it was " + before;
}

}  // namespace tessera::compiler
