// The options of LibTorch's modules, which forward reads: dropout p, eps, strides.
#include "tessera/compile/detail/api/module_guard.h"
#include "tessera/nn/modules.h"

namespace tessera::compiler {
namespace {

struct FoundOptions {
  bool known = false;
  const void* begin = nullptr;
  size_t size = 0;
};

template <class Impl>
bool find_options_as(const torch::nn::Module& module, FoundOptions& found) {
  const auto* impl = dynamic_cast<const Impl*>(&module);
  if (!impl) return false;
  found.known = true;
  if constexpr (requires { impl->options; }) {
    found.begin = &impl->options;
    found.size = sizeof(impl->options);
  }
  return true;
}

}  // namespace

bool find_torch_options(const torch::nn::Module& module, const void*& begin, size_t& size) {
  FoundOptions found;
#define TESSERA_FIND_OPTIONS(Name) || find_options_as<torch::nn::Name##Impl>(module, found)
  (void)(typeid(module) == typeid(torch::nn::Module) || find_options_as<torch::nn::EmbeddingImpl>(module, found) ||
         find_options_as<torch::nn::EmbeddingBagImpl>(module, found) ||
         find_options_as<torch::nn::SequentialImpl>(module, found) ||
         find_options_as<torch::nn::ModuleListImpl>(module, found) ||
         find_options_as<torch::nn::ModuleDictImpl>(module, found) ||
         find_options_as<torch::nn::ParameterListImpl>(module, found) ||
         find_options_as<torch::nn::ParameterDictImpl>(module, found)
             TESSERA_FOR_EACH_TORCH_MODULE(TESSERA_FIND_OPTIONS));
#undef TESSERA_FIND_OPTIONS
  begin = found.begin;
  size = found.size;
  return found.known || typeid(module) == typeid(torch::nn::Module);
}

}  // namespace tessera::compiler
