#pragma once
#include "tessera/base/detail/deferred_key.h"

// How ops get onto the tape: under a mode key above autograd, by a fallback that runs each of them on the meta device.
namespace tessera::detail::deferred {

void enter_recording();
void leave_recording();
bool recording();  // on this thread, inside deferred_init

}  // namespace tessera::detail::deferred
