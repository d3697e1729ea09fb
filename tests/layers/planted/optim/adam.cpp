#include "tessera/data_parallel/ddp.h"  // BAD: these two stay apart
#include "tessera/optim/adam.h"
