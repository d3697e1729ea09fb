#include "tessera/base/detail/warn_once.h"
#include "tessera/nowhere/at_all.h"  // BAD: no such layer
