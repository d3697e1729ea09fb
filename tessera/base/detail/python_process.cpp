#include "tessera/base/detail/python_process.h"

#include <dlfcn.h>

namespace tessera {

bool python_torch_loaded() {
  auto initialised = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  if (!initialised || !initialised()) return false;
  void* library = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library) dlclose(library);
  return library != nullptr;
}

}  // namespace tessera
