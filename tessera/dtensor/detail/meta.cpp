#include "tessera/dtensor/detail/meta.h"

#include "tessera/comm/functional_collectives.h"
#include "tessera/placement/detail/dtensor_impl.h"

namespace tessera {

void* DTensorMeta::operator new(size_t) { return detail::FreeList<sizeof(DTensorMeta)>::take(); }
void DTensorMeta::operator delete(void* memory) { detail::FreeList<sizeof(DTensorMeta)>::give(memory); }

namespace detail {
namespace {

// The error text of data_ptr(), torch::save and std::cout on a DTensor. It is set on every DTensor, so it is short
// enough for std::string to store without an allocation.
constexpr const char* kNoStorageMessage = "use to_local()";

c10::intrusive_ptr<DTensorImpl> new_impl(const TensorSpec& spec) {
  auto impl = c10::intrusive_ptr<DTensorImpl>::unsafe_steal_from_new(
      new DTensorImpl(spec.prototype->key_set(), spec.prototype->dtype(), spec.device));
  impl->copy_geometry(*spec.prototype);
  return impl;
}

void attach(c10::TensorImpl& impl, c10::intrusive_ptr<c10::BackendMeta> meta) {
  impl.set_backend_meta(std::move(meta));
  impl.release_storage_and_set_meta_custom_data_ptr_error_msg_(std::string(kNoStorageMessage));
}

}  // namespace

void wait_for_pending(DTensorMeta& meta) {
  funcol::wait(meta.local, meta.pending);  // if this throws, the tensor stays pending
  meta.pending.reset();
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

void replace(const at::Tensor& t, at::Tensor local, SpecRef spec) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(spec->sizes, spec->strides);
  impl->set_backend_meta(c10::make_intrusive<DTensorMeta>(std::move(local), std::move(spec)));
}

}  // namespace detail
}  // namespace tessera
