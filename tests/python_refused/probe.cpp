// Loaded into a Python process by run.py: says what init() says there.
#include "tessera/comm/world.h"

#include <string>

extern "C" const char* tessera_init_says() {
  static std::string said;
  try {
    tessera::init();
    said = "nothing: it accepted";
  } catch (const c10::Error& error) {
    said = error.what_without_backtrace();
  }
  return said.c_str();
}
