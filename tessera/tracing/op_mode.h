#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera {

// Sees every op that runs on this thread below autograd, and may stand in for it. A recorder, the step tracer and
// selective checkpointing are modes; several can be on at a time, the innermost is asked first:
//
//   torch::mm(a, b)  ->  autograd  ->  innermost mode  ->  next()  ->  outer mode  ->  next()  ->  the kernel
//
// Of an op on distributed tensors a mode sees the op, and then, from inside of next(), what the op does to this rank's
// pieces. Of an op on plain tensors it sees the op alone, not what its kernel calls.
class OpMode {
 public:
  virtual ~OpMode() = default;
  // Puts results in the place of the arguments: by next(), or by itself. An op that the mode calls for purposes of
  // its own comes here too, unless called under an OpModesOff.
  virtual void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) = 0;

 protected:
  void next(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const;

 private:
  friend class OpModeScope;
  OpMode* outer_ = nullptr;
};

// Turns a mode on for this thread while alive. A mode can be on once at a time. Backward runs on this thread then,
// whatever its device, or the mode would not see it.
class OpModeScope {
 public:
  explicit OpModeScope(OpMode& mode);
  ~OpModeScope();
  OpModeScope(const OpModeScope&) = delete;

 private:
  OpMode* outer_;
  bool was_included_, had_threads_;
};

// No mode sees anything on this thread while alive.
class OpModesOff {
 public:
  OpModesOff();
  ~OpModesOff();
  OpModesOff(const OpModesOff&) = delete;

 private:
  bool was_excluded_;
};

}  // namespace tessera
