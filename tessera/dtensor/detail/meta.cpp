#include "tessera/dtensor/detail/meta.h"

#include "tessera/comm/functional_collectives.h"
#include "tessera/placement/detail/dtensor_impl.h"

namespace tessera {

void* DTensorMeta::operator new(size_t) { return detail::FreeList<sizeof(DTensorMeta)>::take(); }
void DTensorMeta::operator delete(void* memory) { detail::FreeList<sizeof(DTensorMeta)>::give(memory); }

namespace detail {
namespace {

// What data_ptr(), torch::save and std::cout say of a distributed tensor. Set on every tensor, so short enough to need
// no memory of its own.
constexpr const char* kInstead = "use to_local()";

c10::intrusive_ptr<DTensorImpl> stamped(const TensorSpec& spec) {
  auto impl = c10::intrusive_ptr<DTensorImpl>::unsafe_steal_from_new(
      new DTensorImpl(spec.stamp->key_set(), spec.stamp->dtype(), spec.device));
  impl->copy_geometry(*spec.stamp);
  return impl;
}

void attach(c10::TensorImpl& impl, c10::intrusive_ptr<c10::BackendMeta> meta) {
  impl.set_backend_meta(std::move(meta));
  impl.release_storage_and_set_meta_custom_data_ptr_error_msg_(std::string(kInstead));
}

}  // namespace

void settle(DTensorMeta& meta) {
  funcol::wait(meta.local, meta.pending);  // if it throws, the tensor stays pending
  meta.pending.reset();
}

at::Tensor wrap(at::Tensor local, SpecRef spec) {
  auto impl = stamped(*spec);
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
  auto impl = stamped(*meta_of(t).spec);
  attach(*impl, t.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
  impl->adopt_keys(t.key_set());
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>(std::move(impl)));
}

void replace(const at::Tensor& t, at::Tensor local, SpecRef spec) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(spec->sizes, spec->strides);
  impl->set_backend_meta(c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec)));
}

}  // namespace detail
}  // namespace tessera
