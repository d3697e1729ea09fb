#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <optional>
#include <vector>

namespace tessera::compiler {

// Finds the numbers in a trace that must not be part of the program: learning rates, which optimizers announce
// (base/live_number.h), and the place in the stream of random numbers.
class LiveNumbers {
 public:
  // What the argument of an op is, if it is such a number; adds it to program.numbers the first time.
  std::optional<Live> find(Program& program, const c10::OperatorHandle& op, size_t argument, const c10::IValue& value);

  // The stream when tracing begins: draws are counted from there.
  int64_t seed = 0, offset = 0;

 private:
  std::vector<std::pair<double, int32_t>> rates_;  // the double that stands for a number, and its place
  int32_t stream_ = -1;                            // where "seed" is; "draws" is next
  bool own_stream_ = false;                        // of the op under way: draws from another have their own numbers
};

}  // namespace tessera::compiler
