#pragma once
#include "tessera/propagate/detail/op_entry.h"

#include <optional>
#include <string_view>

// How an op runs on distributed tensors. Most ops have a rule. The others take a generic route, so that an op that is
// correct for plain tensors is correct for distributed ones.
namespace tessera::propagate {

enum class Route : uint8_t {
  Rule,        // a sharding rule of tessera/rules
  Functional,  // out= and in-place forms: the functional form runs, and its results are copied into the arguments
  Decompose,   // the composite kernel of an op of another library
  Gathered,    // all inputs are redistributed to Replicate; the results are replicated
  None,        // an op that writes an argument or returns a view, without a rule and without a functional form
};

struct OpRoute {
  Route route;
  // For Route::Functional. Its results are the new results of the op, then the values of the out= arguments, then those
  // of the other arguments that it writes.
  std::optional<c10::OperatorHandle> functional;
};

OpRoute route_of(const OpEntry& entry);

// The functional form of an op that writes arguments, or none:
//   add.out, add_.Tensor -> add.Tensor      max.dim_max -> max.dim      rrelu_with_noise -> rrelu_with_noise_functional
std::optional<c10::OperatorHandle> functional_form(const c10::OperatorHandle& op);

std::string_view to_string(Route route);

}  // namespace tessera::propagate
