// run.py loads this library into a Python process. It returns the error message of init() there.
#include "tessera/comm/world.h"

#include <string>

extern "C" const char* tessera_init_error() {
  static std::string message;
  try {
    tessera::init();
    message = "no error: init() accepted the process";
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  }
  return message.c_str();
}
