#pragma once
#include "tessera/rules/detail/build.h"

#include <vector>

// What all elementwise ops share: R everywhere, or any dim cut wherever an operand has it.
namespace tessera::rules {

// A Partial that an op lets through: one entry for each tensor of the call.
struct PartialStrategy {
  std::vector<Placement> in;
  Placement out;
};

// Rows of an elementwise op over the tensors of the call, broadcast, with `partials` on top (those of another number of
// tensors are passed over, and in place those that would change how the first one lies). Outputs: as many as the schema
// returns, all of the broadcast sizes; none for in-place ops.
Rule elementwise(const OpQuery& query, c10::ArrayRef<PartialStrategy> partials = {});

// An op that takes only the geometry of its tensor: any cut is kept, and a Partial gives R, because nothing is read and
// each rank makes the value itself.
Rule like_factory(const OpQuery& query, Sizes strides);

}  // namespace tessera::rules
