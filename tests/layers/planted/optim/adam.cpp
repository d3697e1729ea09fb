#include "tessera/optim/adam.h"
#include "tessera/data_parallel/ddp.h"  // BAD: these two layers are independent
