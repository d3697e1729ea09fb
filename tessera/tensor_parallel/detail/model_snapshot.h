#pragma once
#include "tessera/nn/detail/forward_state.h"
#include "tessera/nn/hooks.h"

#include <torch/nn/modules/container/sequential.h>

#include <memory>
#include <utility>
#include <vector>

namespace tessera {

// A model before it is tried out. Trials may parallelize it, add hooks, run forward and backward; each starts from the
// state of the snapshot. The destructor restores the model: the same tensors with the same memory and gradients, the
// same hooks and submodules, the same random states. The trials work on copies of buffers and hooks. The model need not
// be cloneable.
class ModelSnapshot {
 public:
  ModelSnapshot(Module& model, const Tensors& inputs);
  ~ModelSnapshot();
  ModelSnapshot(const ModelSnapshot&) = delete;

  // Starts a trial: undoes what the last one has changed.
  void begin_trial();
  void restore_random_states() const { random_states_.restore(); }
  // Uses `value` for the parameter in all following trials.
  void replace_parameter(const at::Tensor& parameter, const at::Tensor& value);

 private:
  struct SavedTensor {
    at::Tensor tensor, data, grad;
    at::Tensor trial;  // the data in a trial
  };
  struct SavedHooks {
    HookPoint* point;
    std::shared_ptr<detail::ModuleHooks> hooks;
  };
  struct SavedSequential {
    torch::nn::SequentialImpl* sequential;
    std::vector<torch::nn::AnyModule> children;
  };
  void restore_structure();

  Module& model_;
  std::vector<std::shared_ptr<Module>> alive_;
  std::vector<SavedTensor> parameters_, buffers_;
  std::vector<SavedHooks> hooks_;
  std::vector<SavedSequential> sequentials_;
  DeviceMesh replicated_over_;
  detail::RngStates random_states_;
};

}  // namespace tessera
