#pragma once
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera::data_parallel::fsdp {

// What parameters() of a module shows: a flat parameter, or the originals that it stands for, in the order they had.
// Typed fields of the modules are not touched.
class Registration {
 public:
  // Takes the tensors out of `module` and of everything below, and puts `flat` into it.
  Registration(torch::nn::Module& module, const std::vector<at::Tensor>& originals, const std::string& name,
               const at::Tensor& flat);
  std::vector<torch::nn::Module*> taken_from() const;  // without `module` itself
  void show_originals();
  void show_flat();

 private:
  using Dict = torch::OrderedDict<std::string, at::Tensor>;
  struct Owner {
    torch::nn::Module* module;
    Dict originals, flat;  // what it shows in each case
  };
  std::vector<Owner> owners_;
};

}  // namespace tessera::data_parallel::fsdp
