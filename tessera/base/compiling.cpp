#include "tessera/base/compiling.h"

#include <utility>

namespace tessera {

int& CompilingScope::depth() {
  thread_local int it = 0;
  return it;
}
size_t& CompilingScope::counter() {
  thread_local size_t it = 0;
  return it;
}
CompilingListener*& CompilingScope::listener() {
  thread_local CompilingListener* it = nullptr;
  return it;
}
std::vector<CompilingScope::Guard>& CompilingScope::guards() {
  thread_local std::vector<Guard> it;
  return it;
}
std::vector<CompilingScope::Guard> CompilingScope::take_guards() { return std::exchange(guards(), {}); }
bool compiling() { return CompilingScope::depth() > 0; }

}  // namespace tessera
