#include "tessera/nn/distribute_module.h"

#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/detail/hookable.h"

#include <ATen/core/grad_mode.h>

namespace tessera {
namespace {

// The data of all parameters and buffers, to restore them after an error.
class SavedData {
 public:
  explicit SavedData(const Module& module) {
    for (const auto& t : module.parameters()) values_.emplace_back(t, t.detach());
    for (const auto& t : module.buffers()) values_.emplace_back(t, t.detach());
  }
  void restore() {
    at::NoGradGuard no_grad;
    for (auto& [tensor, value] : values_) tensor.set_data(value);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> values_;
};

}  // namespace

void distribute_module(Module& module, const DeviceMesh& mesh, DistributeModuleFns fns) {
  if (fns.input || fns.output) hook_point(module);  // throws before anything changes
  SavedData before(module);
  try {
    const auto modules = module.named_modules();
    for (const auto& item : modules)
      if (fns.partition) fns.partition(item.key(), *item.value(), mesh);
    const Placements replicated(mesh.ndim(), Replicate());
    const auto replicate = [&](at::Tensor t) {
      if (t.defined() && !is_dtensor(t)) distribute_in_place(t, mesh, replicated);
    };
    for (const auto& t : module.parameters()) replicate(t);
    for (const auto& t : module.buffers()) replicate(t);
  } catch (...) {
    before.restore();
    throw;
  }
  if (fns.input)
    register_forward_pre_hook(module,
                              [f = fns.input, mesh](Module& m, const Tensors& inputs) { return f(m, inputs, mesh); });
  if (fns.output)
    register_forward_hook(module, [f = fns.output, mesh](Module& m, const Tensors&, const Tensors& outputs) {
      return f(m, outputs, mesh);
    });
}

}  // namespace tessera
