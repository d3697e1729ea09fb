// A minimal user program: Tessera's headers and library, with LibTorch as a transitive dependency.
#include <tessera/base/error.h>
#include <tessera/base/reduce_op.h>
#include <tessera/version.h>

#include <iostream>

int main() {
  try {
    tessera::parse_reduce_op("sun");
  } catch (const c10::Error& error) {
    std::cout << "consumer ran with Tessera " TESSERA_VERSION ": " << error.what_without_backtrace() << '\n';
    return 0;
  }
  return 1;
}
