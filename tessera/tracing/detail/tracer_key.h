#pragma once
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera {

// The dispatch key of op modes (op_mode.h has its fallback), and so of the tracer. It is below autograd and above every
// backend. LibTorch does not use it. If a later version of LibTorch uses it, change it here to PrivateUse2.
inline constexpr c10::DispatchKey kTracerKey = c10::DispatchKey::Fake;

// True if an op mode is active on this thread. Then no op may bypass the dispatcher.
inline bool tracing() { return c10::impl::tls_local_dispatch_key_set().included_.has(kTracerKey); }

}  // namespace tessera
