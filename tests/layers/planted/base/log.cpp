#include "tessera/base/detail/warn_once.h"
#include "tessera/comm/world.h"                       // BAD: upside down
#include "tessera/tessera.h"                          // BAD: that one is for users
const char* there() { return std::getenv("THERE"); }  // BAD: not in settings.cpp
// a comment about getenv() is none
