#pragma once
#include <string>
#include <utility>

namespace tessera {

// Which module runs on this thread, for errors, records and debug modes. Whoever calls a module keeps a frame on its
// stack meanwhile: two pointers, since the name is wanted rarely. A module does not know where it hangs; the frames
// do, because they nest:
//
//   GPT            "GPT"
//     h.0          "GPT.h.0"            each is looked up in the children of the one around it
//       attn       "GPT.h.0.attn"
struct ModuleFrame {
  const void* module;                             // what `name` understands
  std::string (*name)(const ModuleFrame& frame);  // in full
  const ModuleFrame* outer;
};

// The innermost frame of this thread; null outside of modules.
const ModuleFrame*& innermost_module();

// The name of the innermost; "" outside of modules.
std::string running_module();

// " in module GPT.h.0.attn", to end a sentence of an error with; "" outside of modules.
std::string in_module();

class ModuleScope {
 public:
  ModuleScope(const void* module, std::string (*name)(const ModuleFrame&))
      : innermost_(innermost_module()), frame_{module, name, innermost_} {
    innermost_ = &frame_;
  }
  ~ModuleScope() { innermost_ = frame_.outer; }
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  const ModuleFrame*& innermost_;
  ModuleFrame frame_;
};

// The same with a name given in full, for code that is no module. Example:  ModuleNameScope running("loss");
class ModuleNameScope {
 public:
  explicit ModuleNameScope(std::string name) : name_(std::move(name)), scope_(&name_, &given) {}

 private:
  static std::string given(const ModuleFrame& frame) { return *static_cast<const std::string*>(frame.module); }
  std::string name_;
  ModuleScope scope_;
};

}  // namespace tessera
