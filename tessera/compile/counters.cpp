#include "tessera/compile/counters.h"

tessera::Counters& tessera::counters() {
  thread_local Counters it;
  return it;
}
