#include "tessera/dtensor/detail/meta.h"

#include "tessera/comm/functional_collectives.h"
#include "tessera/dtensor/detail/gathered_view.h"
#include "tessera/placement/detail/dtensor_impl.h"

namespace tessera {

void* DTensorMeta::operator new(size_t) { return detail::FreeList<sizeof(DTensorMeta)>::take(); }
void DTensorMeta::operator delete(void* memory) { detail::FreeList<sizeof(DTensorMeta)>::give(memory); }

namespace detail {
namespace {

c10::intrusive_ptr<DTensorImpl> new_impl(const TensorSpec& spec) {
  auto impl = c10::intrusive_ptr<DTensorImpl>::unsafe_steal_from_new(
      new DTensorImpl(spec.prototype->key_set(), spec.prototype->dtype(), spec.device));
  impl->copy_geometry(*spec.prototype);
  return impl;
}

void attach(DTensorImpl& impl, c10::intrusive_ptr<c10::BackendMeta> meta) { impl.set_backend_meta(std::move(meta)); }

}  // namespace

void make_ready(DTensorMeta& meta) {
  if (meta.pending) {
    funcol::wait(meta.local, meta.pending);  // if this throws, the tensor stays pending
    meta.pending.reset();
  }
  if (meta.gathered) refresh(*meta.gathered);
}

void after_write(const at::Tensor& t) {
  if (!is_dtensor(t)) return;
  const auto& meta = meta_of(t);
  if (!meta.local.is_inference()) meta.local.unsafeGetTensorImpl()->bump_version();
  if (C10_UNLIKELY(static_cast<bool>(meta.gathered))) write_back(*meta.gathered);
}

namespace {

// The tensor of which `t` is a view, if it is a DTensor, else `t`.
at::Tensor dtensor_base(const at::Tensor& t) {
  if (!t.is_view()) return t;
  const at::Tensor base(t._base());
  return is_dtensor(base) ? base : t;
}

}  // namespace

bool has_plain_alias(const at::Tensor& t) {
  return meta_of(t).has_plain_alias || meta_of(dtensor_base(t)).has_plain_alias;
}

void set_plain_alias(const at::Tensor& t) {
  meta_of(t).has_plain_alias = true;
  meta_of(dtensor_base(t)).has_plain_alias = true;
}

void share_version_counter(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_inference() || to.is_inference()) return;
  to.unsafeGetTensorImpl()->set_version_counter(from.unsafeGetTensorImpl()->version_counter());
}

at::Tensor wrap(at::Tensor local, SpecRef spec) {
  auto impl = new_impl(*spec);
  attach(*impl, c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec)));
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>(std::move(impl)));
}

at::Tensor wrap(at::Tensor local, SpecRef spec, comm::Group pending) {
  auto t = wrap(std::move(local), std::move(spec));
  meta_of(t).pending = std::move(pending);
  return t;
}

at::Tensor local_without_storage(const at::Tensor& t, const TensorSpec& spec) {
  auto impl = t.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous(spec.local_sizes);
  return at::Tensor(std::move(impl));
}

at::Tensor share(const at::Tensor& t) {
  auto impl = new_impl(*meta_of(t).spec);
  attach(*impl, t.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
  impl->adopt_keys(t.key_set());
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>(std::move(impl)));
}

namespace {

c10::intrusive_ptr<DTensorMeta> alias_meta(at::Tensor local, SpecRef spec, const DTensorMeta& of) {
  auto meta = c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec));
  meta->gathered = of.gathered;
  meta->has_plain_alias = of.has_plain_alias;
  meta->accepts_plain = of.accepts_plain;
  return meta;
}

}  // namespace

at::Tensor wrap_alias(at::Tensor local, SpecRef spec, const at::Tensor& base) {
  auto out = wrap(at::Tensor(), spec);
  out.unsafeGetTensorImpl()->set_backend_meta(alias_meta(std::move(local), std::move(spec), meta_of(base)));
  share_version_counter(base, out);
  return out;
}

void replace(const at::Tensor& t, at::Tensor local, SpecRef spec) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(spec->sizes, spec->strides);
  impl->set_backend_meta(alias_meta(std::move(local), std::move(spec), meta_of(t)));
}

}  // namespace detail
}  // namespace tessera
