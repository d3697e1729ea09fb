#pragma once
#include <string>

namespace tessera::comm::detail {

// A backend that can free its members with a reason; c10d's own abort() takes none.
struct Poisonable {
  virtual ~Poisonable() = default;
  virtual void poison(const std::string& reason) = 0;  // from any thread; the first reason stays
};

}  // namespace tessera::comm::detail
