#pragma once
#include "tessera/tracing/op_mode.h"

#include <cstdint>

namespace tessera::testing {

// Counts the values that are read on the host (item()). A tracer would have to treat them as constants.
// Example:  HostReadCounter mode;
//           const OpModeScope on(mode);
//           optimizer.step();
//           EXPECT_EQ(mode.reads, 0);
struct HostReadCounter final : OpMode {
  void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) override {
    ops++;
    reads += op.operator_name().name == "aten::_local_scalar_dense";
    next(op, keys, stack);
  }
  int64_t ops = 0, reads = 0;
};

}  // namespace tessera::testing
