#pragma once
#include <c10/core/DispatchKeySet.h>

namespace tessera {

// The mode key of deferred_init: above autograd, without users in LibTorch. Included on the thread while a module is
// built, and in the keys of each deferred tensor, so that no op on one goes unseen afterwards.
inline constexpr c10::DispatchKey kDeferredKey = c10::DispatchKey::DeferredInit;

// Of the keys of a rank's piece, those that count once autograd is done with the tensor it is of.
inline constexpr c10::DispatchKeySet kKeysBelowAutograd =
    c10::after_ADInplaceOrView_keyset | c10::DispatchKeySet(kDeferredKey);

}  // namespace tessera
