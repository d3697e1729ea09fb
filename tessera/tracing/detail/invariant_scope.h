#pragma once

namespace tessera {

// True while a scope of Numerics::Invariant (numerics/) is open on this thread. For code that sums local tensors
// itself: it must sum the DTensors instead, because the scope takes a plain tensor for one that every rank has.
inline bool& invariant_scope_is_open() {
  static thread_local bool open = false;
  return open;
}

}  // namespace tessera
