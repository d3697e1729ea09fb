#include "tessera/base/compiling.h"

namespace tessera {

int& CompilingScope::depth() {
  thread_local int it = 0;
  return it;
}
bool compiling() { return CompilingScope::depth() > 0; }

}  // namespace tessera
