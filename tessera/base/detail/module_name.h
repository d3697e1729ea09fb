#pragma once
#include <string>
#include <utility>

namespace tessera {

// Which module runs on this thread, for errors, records and debug modes. The caller of a module keeps a frame on its
// stack during the call. A frame has only pointers, because the name is needed rarely. A module does not know its
// parent, but the frames nest, so the full name is found from them:
//
//   GPT            "GPT"
//     h.0          "GPT.h.0"            each is found among the children of the outer one
//       attn       "GPT.h.0.attn"
struct ModuleFrame {
  const void* module;                             // an argument for `name`
  std::string (*name)(const ModuleFrame& frame);  // the full name
  const ModuleFrame* outer;
};

// The innermost frame of this thread, or null outside modules.
const ModuleFrame*& innermost_module();

// The full name of the innermost module, or "" outside modules.
std::string running_module();

// " in module GPT.h.0.attn", as the end of an error message; "" outside modules.
std::string in_module();

// Keeps a frame while alive.
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

// The same with a given name, for code outside modules. Example:  ModuleNameScope running("loss");
class ModuleNameScope {
 public:
  explicit ModuleNameScope(std::string name) : name_(std::move(name)), scope_(&name_, &given) {}

 private:
  static std::string given(const ModuleFrame& frame) { return *static_cast<const std::string*>(frame.module); }
  std::string name_;
  ModuleScope scope_;
};

}  // namespace tessera
