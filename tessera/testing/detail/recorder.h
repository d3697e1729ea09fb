#pragma once
#include "tessera/tracing/op_mode.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

// While alive, records every op on plain tensors in this thread, below autograd. For an op on DTensors it records the
// ops on local tensors, with collectives and waits. replay() runs the same ops again: on the tensors that existed
// before the recording, and on new tensors in place of those that the recorded ops created. A test with it shows that
// nothing bypasses the dispatcher: the replayed step equals the step.
//
// Example:  Recorder r;  step();  r.stop();  restore(state);  r.replay();
class Recorder final : private OpMode {
 public:
  Recorder();
  ~Recorder() override;
  Recorder(const Recorder&) = delete;
  void stop();
  void replay() const;
  std::vector<std::string> ops() const;  // names, in order

 private:
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override;
  struct RecordedOp {
    c10::OperatorHandle op;
    std::vector<c10::IValue> args;  // replay() looks tensors up by address
    std::vector<c10::IValue> results;
  };
  std::vector<RecordedOp> records_;
  std::optional<OpModeScope> on_;
};

}  // namespace tessera::testing
