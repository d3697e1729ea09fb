#pragma once
#include <cstdint>

namespace tessera::numerics {

// One step of a sum on a stack machine: add the terms [begin, end) in ascending order, then `merges` times take the top
// of the stack and add: top + sum. Then push the sum, or, if subtree >= 0, store it as complete subtree number
// `subtree`.
struct SumStep {
  int64_t begin, end;  // relative to owned.begin
  int merges = 0;
  int subtree = -1;
  bool operator==(const SumStep&) const = default;
};

}  // namespace tessera::numerics
