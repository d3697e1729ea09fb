#include <ATen/core/ivalue.h>
#include <ATen/ops/mm.h>         // BAD: a rule runs no ops
#include "tessera/comm/world.h"  // BAD: a rule does not communicate
