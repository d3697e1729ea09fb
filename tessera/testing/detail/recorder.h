#pragma once
#include "tessera/tracing/op_mode.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

// Records every op that runs on plain tensors in this thread while alive, below autograd: of an op on distributed
// tensors, what it does to this rank's pieces, its collectives and waits included. replay() runs the same ops again, on
// the tensors that were there before the recording and on new ones in the place of those it made.
// Proves that nothing bypasses the dispatcher: a replayed step is the step.
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
  struct Record {
    c10::OperatorHandle op;
    std::vector<c10::IValue> args;  // tensors as they were; looked up by address when replayed
    std::vector<c10::IValue> results;
  };
  std::vector<Record> records_;
  std::optional<OpModeScope> on_;
};

}  // namespace tessera::testing
