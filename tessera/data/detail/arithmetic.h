#pragma once
#include "tessera/data/dataset.h"

namespace tessera::data {

// Options of arithmetic().
struct ArithmeticOptions {
  int64_t digits = 2;  // of both summands, 1 to 8
  uint64_t seed = 0;

  bool operator==(const ArithmeticOptions&) const = default;
};

// An endless generated dataset of additions, equal on every machine. Only the digits of the answer are targets, lowest
// first: then each digit follows from two digits and a carry.
//
//   37+45=280       37 + 45 = 82
//
// A hash of the problem, not of the sample number, selects the held-out ones: one in sixteen. So no held-out problem is
// ever in the training part, and a correct answer shows generalization.
Split arithmetic(const ArithmeticOptions& options = {});

}  // namespace tessera::data
