#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <optional>
#include <vector>

namespace tessera::compiler {

// Finds the numbers among op arguments that the program must read on every run instead of keeping as constants:
//   - learning rates, which optimizers mark with runtime_scalar() (tracing/detail/runtime_scalar.h);
//   - seed and offset of Tessera's random stream.
class RuntimeScalars {
 public:
  // `seed`, `offset`: the random stream when tracing starts. Offsets of the program are relative to it.
  RuntimeScalars(int64_t seed, int64_t offset) : seed_(seed), offset_(offset) {}

  // If `value` is such a number: its reference into program.numbers, to which it is added on first use.
  std::optional<RuntimeScalar> find(Program& program, const c10::OperatorHandle& op, size_t argument,
                                    const c10::IValue& value);

 private:
  int64_t seed_, offset_;
  std::vector<std::pair<double, int32_t>> rates_;  // marker double of a runtime_scalar, index in program.numbers
  int32_t stream_ = -1;                            // index of "seed" in program.numbers; "draws" follows it
  bool own_stream_ = false;                        // the current op draws from Tessera's stream, not from another seed
};

}  // namespace tessera::compiler
