#include "tessera/compile/detail/api/tensor_guard.h"

#include "tessera/compile/detail/ir/type.h"
#include "tessera/dtensor/detail/meta.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>

namespace tessera::compiler {
namespace {

using tessera::detail::local_or_self;

c10::SmallVector<int64_t, 8> layout_of(const at::Tensor& t) {
  c10::SmallVector<int64_t, 8> layout;
  if (t.layout() != c10::kStrided) return layout;
  layout.append(t.sizes().begin(), t.sizes().end());
  layout.append(t.strides().begin(), t.strides().end());
  return layout;
}

// Hooks that the user has registered on the gradient: 0 without hooks, and another number for other hooks. A hook
// that is removed leaves its position, so a new one has a position that none had before.
int hooks_on(const at::Tensor& t) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(t);
  if (!meta) return 0;
  int sum = meta->post_acc_grad_hooks_ ? 1 : 0;
  if (meta->cpp_hooks_list_)
    for (size_t i = 0; i < meta->cpp_hooks_list_->size(); i++)
      if ((*meta->cpp_hooks_list_)[i]) sum = sum * 31 + static_cast<int>(i) + 2;
  return sum;
}

}  // namespace

TensorGuard::TensorGuard(const at::Tensor& t) : text_(describe(t)) {
  if (!t.defined()) return;
  keys_ = t.key_set().raw_repr();
  dtype_ = t.dtype();
  requires_grad_ = t.requires_grad();
  hooks_ = hooks_on(t);
  sizes_and_strides_ = layout_of(t);
  device_ = t.device();
  if (const auto* spec = tessera::detail::spec_or_null(t)) {
    spec_ = SpecRef::reclaim_copy(spec);
    local_layout_ = layout_of(local_or_self(t));
  }
}

bool TensorGuard::same_layout(const c10::TensorImpl& impl, const c10::SmallVector<int64_t, 8>& layout) {
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
      impl.device() != device_ || !same_layout(impl, sizes_and_strides_) || hooks_on(t) != hooks_)
    return false;
  if (!spec_) return true;
  return tessera::detail::spec_or_null(t) == spec_.get() &&
         same_layout(*local_or_self(t).unsafeGetTensorImpl(), local_layout_);
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
  if (hooks_on(t)) out << " with hooks";
  return out.str();
}

std::string TensorGuard::difference(const at::Tensor& t) const {
  if (holds(t)) return "";
  const auto now = describe(t), before = keys_ ? text_ : "undefined";
  return now == before ? now + " of another kind or layout, or with other hooks" : now + ", it was " + before;
}

}  // namespace tessera::compiler
