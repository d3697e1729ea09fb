#include "tessera/base/compiling.h"

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
bool compiling() { return CompilingScope::depth() > 0; }

}  // namespace tessera
