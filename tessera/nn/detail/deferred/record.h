#pragma once
#include "tessera/base/detail/deferred_key.h"

// Records ops on the tape. A boxed fallback under a mode key above autograd runs each op on the meta device.
namespace tessera::detail::deferred {

void enter_recording();
void leave_recording();
bool recording();  // true inside deferred_init on this thread

}  // namespace tessera::detail::deferred
