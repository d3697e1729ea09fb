#include <ATen/core/ivalue.h>
#include <ATen/ops/mm.h>         // BAD: a rule runs nothing
#include "tessera/comm/world.h"  // BAD: and sends nothing, though comm is above it
