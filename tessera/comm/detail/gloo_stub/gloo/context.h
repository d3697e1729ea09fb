#pragma once
#include <chrono>
// Only ever held by shared_ptr; see backends/gloo.cpp.
namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds);
};
}  // namespace gloo
