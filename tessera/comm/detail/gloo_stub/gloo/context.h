#pragma once
#include <chrono>
// Used behind shared_ptr only; see backends/gloo.cpp.
namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds);
};
}  // namespace gloo
