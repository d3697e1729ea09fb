#pragma once
#include "tessera/data/dataset.h"

namespace tessera::data {

struct ArithmeticOptions {
  int64_t digits = 2;  // of both terms, 1 to 8
  uint64_t seed = 0;

  bool operator==(const ArithmeticOptions&) const = default;
};

// Sums, without end, the same on every machine. Only the digits of the answer count, lowest first: then each follows
// from two digits and a carry.
//
//   37+45=280       37 + 45 = 82
//
// Which problems are held out is a matter of the problem, not of its number: one in sixteen, told by a hash. So none
// of them is ever trained on, and answering them right is having understood.
Split arithmetic(const ArithmeticOptions& options = {});

}  // namespace tessera::data
