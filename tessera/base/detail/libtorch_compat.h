#pragma once
#include <torch/headeronly/version.h>

#include <exception>

// The only file that depends on the version of LibTorch. 2.13 is the main target, 2.11 the minimum.
#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11)
#error "Tessera needs LibTorch 2.11 or newer"
#endif

namespace tessera::libtorch {
inline constexpr bool kAtLeast213 = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13;

// The single-tensor collectives of ProcessGroup have new names in 2.13. c10d::Backend, which we call directly, keeps
// the old ones.
template <class ProcessGroup, class Tensor, class... Options>
auto all_gather_single(ProcessGroup& group, Tensor& out, Tensor& in, const Options&... options) {
  if constexpr (requires { group.all_gather_single(out, in, options...); })
    return group.all_gather_single(out, in, options...);
  else
    return group._allgather_base(out, in, options...);
}
template <class ProcessGroup, class Tensor, class... Options>
auto reduce_scatter_single(ProcessGroup& group, Tensor& out, Tensor& in, const Options&... options) {
  if constexpr (requires { group.reduce_scatter_single(out, in, options...); })
    return group.reduce_scatter_single(out, in, options...);
  else
    return group._reduce_scatter_base(out, in, options...);
}

// The backend of a ProcessGroup for a type of device, or null. 2.11 can only try.
template <class ProcessGroup, class DeviceType>
auto backend_or_null(ProcessGroup& group, DeviceType device) -> decltype(group.getBackend(device)) {
  if constexpr (requires { group.hasBackendForDeviceType(device); }) {
    if (!group.hasBackendForDeviceType(device)) return {};
    return group.getBackend(device);
  } else {
    try {
      return group.getBackend(device);
    } catch (const std::exception&) {
      return {};
    }
  }
}

// Refuses access to the memory of a storage with `message`, or allows it again; the data stays. 2.11 cannot allow it
// again, so there it is never refused.
template <class StorageImpl, class Message>
void refuse_memory_access(StorageImpl& storage, bool refuse, const Message& message) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    if (refuse)
      storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
    else
      storage.clear_data_ptr_access_error_msg_();
  }
}

}  // namespace tessera::libtorch
