#pragma once
#include <c10/core/DispatchKeySet.h>

namespace tessera {

// The dispatch key of deferred_init. It is above autograd, and LibTorch does not use it. It is included on the thread
// while a module is built. Each deferred tensor has it too, so later ops on that tensor are intercepted.
inline constexpr c10::DispatchKey kDeferredKey = c10::DispatchKey::DeferredInit;

// The dispatch keys of a local tensor that apply below the autograd of its distributed tensor.
inline constexpr c10::DispatchKeySet kKeysBelowAutograd =
    c10::after_ADInplaceOrView_keyset | c10::DispatchKeySet(kDeferredKey);

}  // namespace tessera
