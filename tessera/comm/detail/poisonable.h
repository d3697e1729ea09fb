#pragma once
#include <string>

namespace tessera::comm::detail {

// A backend that can free all members of its group with a reason. c10d's own abort() takes none.
struct Poisonable {
  virtual ~Poisonable() = default;
  virtual void poison(const std::string& reason) = 0;
};

}  // namespace tessera::comm::detail
