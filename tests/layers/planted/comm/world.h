#include "tessera/base/log.h"
#include "tessera/nowhere/at_all.h"  // BAD: no such layer
