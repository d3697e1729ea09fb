#pragma once
#include "tessera/nn/detail/deferred/call.h"

#include <optional>
#include <vector>

// Runs an op on the meta device: the outputs have the same shapes and aliasing as on a real device, and the op reports
// the same errors.
namespace tessera::detail::deferred {

// The device that the outputs would have. device(meta), the value in the options of a deferred tensor, means the device
// of that tensor.
c10::Device real_device(const DeferredCall& call, const Tape& tape);

// The index of the argument `copy` of a to() that changes the device. to() copies then, but on the meta device it would
// return its argument.
std::optional<size_t> copy_to_set(const DeferredCall& call, c10::Device device);

// The outputs, on the meta device. In-place ops return their arguments. nullopt: the op has no meta kernel and ran as
// its decomposition instead, so its outputs have already replaced its arguments on the stack.
std::optional<std::vector<c10::IValue>> run_on_meta(const DeferredCall& call, c10::Device device,
                                                    torch::jit::Stack* stack);

// A deferred tensor has two storages without memory. The error storage throws when its data pointer is read, which is a
// mistake of the user. LibTorch's meta kernels read the pointer too, to check for overlaps, so they receive the other
// one.
void set_storage(const at::Tensor& t, c10::Storage error_storage);
c10::Storage make_error_storage(const c10::Storage& meta_storage);

}  // namespace tessera::detail::deferred
