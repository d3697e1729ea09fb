#include "tessera/base/detail/warn_once.h"
#include "tessera/comm/world.h"                       // BAD: a higher layer
#include "tessera/tessera.h"                          // BAD: the umbrella header is for users
const char* there() { return std::getenv("THERE"); }  // BAD: not in settings.cpp
// getenv() in a comment is allowed
