#include "tessera/placement/detail/dtensor_impl.h"

#include <mutex>

namespace tessera {

bool DTensorImpl::has_storage() const {
  if (TensorImpl::has_storage()) return true;  // set_data() made it plain
  static std::mutex mutex;                     // threads may share a tensor
  const std::lock_guard lock(mutex);
  if (extra_meta_ && !extra_meta_->custom_data_ptr_error_msg_)
    extra_meta_->custom_data_ptr_error_msg_ =
        "a DTensor has no data_ptr(): use to_local() or full_tensor(), or print DTensor(t)";
  return false;
}

}  // namespace tessera
