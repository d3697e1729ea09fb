#include "tessera/base/detail/module_name.h"

namespace tessera {

const ModuleFrame*& innermost_module() {
  thread_local constinit const ModuleFrame* innermost = nullptr;
  return innermost;
}

std::string running_module() {
  const auto* frame = innermost_module();
  return frame ? frame->name(*frame) : std::string();
}

std::string in_module() {
  const auto name = running_module();
  return name.empty() ? name : " in module " + name;
}

}  // namespace tessera
