#pragma once
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera::data_parallel::fsdp {

// A module's own dict of parameters, which LibTorch keeps to the module itself.
torch::OrderedDict<std::string, at::Tensor>& registered(torch::nn::Module& module);

// Parameters taken out of the modules that hold them, fields untouched, and put back in the order they had.
class Unregistered {
 public:
  Unregistered() = default;
  // Everything in `module` and below that is one of `tensors`.
  Unregistered(torch::nn::Module& module, const std::vector<at::Tensor>& tensors);
  void put_back();
  void take_out();

 private:
  struct Owner {
    torch::nn::Module* module;
    torch::OrderedDict<std::string, at::Tensor> all;   // as it was
    torch::OrderedDict<std::string, at::Tensor> rest;  // without the tensors
  };
  std::vector<Owner> owners_;
};

}  // namespace tessera::data_parallel::fsdp
