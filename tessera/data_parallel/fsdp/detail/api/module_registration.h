#pragma once
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera::data_parallel::fsdp {

// Switches what parameters() of a module returns: the flat parameter, or the unflattened parameters in their original
// order. The module's own fields (module->weight) do not change.
class ModuleRegistration {
 public:
  // Removes the tensors from `module` and all modules below it, and registers `flat_param` in `module`.
  ModuleRegistration(torch::nn::Module& module, const std::vector<at::Tensor>& unflattened, const std::string& name,
                     const at::Tensor& flat_param);
  std::vector<torch::nn::Module*> inner_modules() const;  // those that lost parameters, without `module` itself
  void register_unflattened();
  void register_flat();

 private:
  using ParameterDict = torch::OrderedDict<std::string, at::Tensor>;
  struct Entry {
    torch::nn::Module* module;
    ParameterDict unflattened, flat;
  };
  std::vector<Entry> entries_;
};

}  // namespace tessera::data_parallel::fsdp
