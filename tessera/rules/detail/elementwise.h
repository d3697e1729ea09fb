#pragma once
#include "tessera/rules/detail/build.h"

#include <vector>

// The strategies that all elementwise ops share: R for all tensors, or any dim sharded in every operand that has it.
namespace tessera::rules {

// A strategy in which an op keeps a partial. `in` has one entry for each tensor of the call.
struct PartialStrategy {
  std::vector<Placement> in;
  Placement out;
};

// The rule of an elementwise op with broadcasting: the strategies above, then `partials`. A partial strategy for
// another number of tensors is skipped. For an in-place op, one that changes the placement of the first tensor is
// skipped. All outputs of the schema have the broadcast sizes; an in-place op has none.
Rule elementwise(const OpQuery& query, c10::ArrayRef<PartialStrategy> partials = {});

// The rule of an op that reads only the sizes of its tensor (zeros_like). It keeps every sharding. A partial input
// gives R, because the op reads no values and each rank computes the same result.
Rule like_factory(const OpQuery& query, Sizes strides);
// The same, with the strides for the memory format that is the last argument of the schema.
Rule like_factory(const OpQuery& query);

}  // namespace tessera::rules
