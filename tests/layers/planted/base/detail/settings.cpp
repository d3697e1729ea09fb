#include <cstdlib>
const char* here() { return std::getenv("HERE"); }
