#pragma once
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace tessera {

// The mode key under which op modes see what runs (op_mode.h, which has its one fallback), the recorder of a train step
// among them: below autograd, above every backend, without users in LibTorch.
// Upstream means to take it for itself one day; PrivateUse2 is then the second choice, and this the only place to
// change.
inline constexpr c10::DispatchKey kTracerKey = c10::DispatchKey::Fake;

// Is a mode on, on this thread? Then nothing may bypass the dispatcher.
inline bool tracing() { return c10::impl::tls_local_dispatch_key_set().included_.has(kTracerKey); }

}  // namespace tessera
