#pragma once
#include "tessera/nn/detail/tape.h"

#include <c10/core/DispatchKey.h>

// How ops get onto the tape: under a mode key above autograd, by a fallback that runs each of them on the meta device.
namespace tessera::detail {

// Without users in LibTorch. Included on the thread inside deferred_init; and in the keys of each deferred tensor, so
// that no op on one goes unseen outside.
inline constexpr c10::DispatchKey kDeferredKey = c10::DispatchKey::DeferredInit;

void enter_recording();
void leave_recording();
bool recording();  // on this thread, inside deferred_init

}  // namespace tessera::detail
