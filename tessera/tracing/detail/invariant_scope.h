#pragma once

namespace tessera {

// True while a scope of Numerics::Invariant (numerics/) is open on this thread. For code that sums local tensors
// itself: it must sum the DTensors instead, because the scope takes a plain tensor for one that every rank has.
inline bool& invariant_scope_is_open() {
  static thread_local bool open = false;
  return open;
}

// While alive, ops of this thread run as they are, although a scope is open: for code whose sums have their order
// already, or are exact. Other op modes, such as a tracer, see the ops.
class InvariantScopePaused {
 public:
  InvariantScopePaused() : was_open_(invariant_scope_is_open()) { invariant_scope_is_open() = false; }
  ~InvariantScopePaused() { invariant_scope_is_open() = was_open_; }
  InvariantScopePaused(const InvariantScopePaused&) = delete;

 private:
  bool was_open_;
};

}  // namespace tessera
