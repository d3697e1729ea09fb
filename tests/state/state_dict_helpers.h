#pragma once
#include "tessera/state/state_dict.h"

#include <string>
#include <vector>

// What the tests of state dicts share.
namespace tessera::test {

using Names = std::vector<std::string>;

// A copy with copies of the tensors.
inline StateDict cloned(const StateDict& dict) {
  StateDict copy;
  for (const auto& [name, t] : dict) copy.insert(name, t.clone());
  return copy;
}

}  // namespace tessera::test
