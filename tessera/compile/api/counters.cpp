#include "tessera/compile/api/counters.h"

tessera::Counters& tessera::counters() {
  thread_local Counters it;
  return it;
}
