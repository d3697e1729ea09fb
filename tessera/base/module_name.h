#pragma once
#include <string>
#include <string_view>

namespace tessera {

// Which module runs on this thread, for debug modes and reports. Set by what calls modules, while it calls one; given in
// full, as named_modules() has it, because a module does not know where it hangs.
// Example:  ModuleNameScope running("layers.0.attention");
class ModuleNameScope {
 public:
  explicit ModuleNameScope(std::string name);
  ~ModuleNameScope();
  ModuleNameScope(const ModuleNameScope&) = delete;
  ModuleNameScope& operator=(const ModuleNameScope&) = delete;

 private:
  friend std::string_view running_module();
  std::string name_;
  const ModuleNameScope* outer_;
};

// The innermost; "" outside of modules.
std::string_view running_module();

}  // namespace tessera
