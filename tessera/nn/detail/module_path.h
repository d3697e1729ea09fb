#pragma once
#include "tessera/base/detail/module_name.h"

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::detail {

// Which modules were running at some time, outermost first: kept so that they can be named, or be the running ones
// again, later. Cheap to take, since names are worked out only when asked; owns no module.
class ModulePath {
 public:
  static ModulePath now();
  std::string name() const;  // what running_module() would have said

  class Scope {
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
  struct Each {
    std::weak_ptr<const torch::nn::Module> module;
    std::optional<std::string> name;  // instead: given in full, by a ModuleNameScope
  };
  std::vector<Each> frames_;
};

}  // namespace tessera::detail
