#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace tessera {

// Intercepts every op that runs on this thread below autograd (PyTorch: TorchDispatchMode). The op recorder, the step
// tracer and selective checkpointing are modes. Several modes can be active; the innermost one runs first:
//
//   torch::mm(a, b)  ->  autograd  ->  innermost mode  ->  next()  ->  outer mode  ->  next()  ->  the kernel
//
// For an op on distributed tensors, a mode sees the op, and then, during next(), the ops on this rank's local tensors.
// For an op on plain tensors, it sees only the op, not the ops that its kernel calls.
//
//   struct Count : OpMode {
//     void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override {
//       ops++;
//       next(op, keys, stack);
//     }
//     int ops = 0;
//   };
//   Count count;
//   { OpModeScope scope(count); model->forward(x); }
class OpMode {
 public:
  virtual ~OpMode() = default;
  // Replaces the arguments on the stack by the results: calls next(), or computes them itself. An op that the mode
  // calls itself is intercepted too, unless it runs under an OpModesOff.
  virtual void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) = 0;

 protected:
  // Runs the op: in the next outer mode, or its kernel.
  void next(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const;

 private:
  friend class OpModeScope;
  OpMode* outer_ = nullptr;
};

// Activates a mode for this thread while alive. A mode must not be active twice. Backward runs on this thread
// meanwhile, for every device, because the mode would not see it on another thread.
class OpModeScope {
 public:
  // Activates the mode; the destructor deactivates it.
  explicit OpModeScope(OpMode& mode);
  ~OpModeScope();
  OpModeScope(const OpModeScope&) = delete;

 private:
  OpMode* outer_;
  bool was_included_, had_threads_;
};

// Deactivates all modes of this thread while alive.
class OpModesOff {
 public:
  // Deactivates the modes; the destructor activates them again.
  OpModesOff();
  ~OpModesOff();
  OpModesOff(const OpModesOff&) = delete;

 private:
  bool was_excluded_;
};

}  // namespace tessera
