#pragma once
#include "tessera/base/detail/module_name.h"

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::detail {

// A snapshot of the running modules, outermost first. It can report their path later, or make them the running modules
// again. A snapshot is cheap: it computes names on demand. It does not own the modules.
class ModulePath {
 public:
  static ModulePath now();
  std::string name() const;  // what running_module() returned at that time

  class Scope {  // makes them the running modules
   public:
    explicit Scope(const ModulePath& path);
    ~Scope();
    Scope(const Scope&) = delete;

   private:
    std::vector<std::shared_ptr<const torch::nn::Module>> alive_;
    std::vector<std::string> names_;
    std::vector<ModuleFrame> frames_;
    const ModuleFrame* before_;
  };

 private:
  struct Frame {
    std::weak_ptr<const torch::nn::Module> module;
    std::optional<std::string> name;  // of a ModuleNameScope, which has no module
  };
  std::vector<Frame> frames_;
};

}  // namespace tessera::detail
