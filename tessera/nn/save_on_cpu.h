#pragma once
#include "tessera/nn/saved_tensor_hooks.h"

namespace tessera {

// Options of SaveOnCpu.
struct SaveOnCpuOptions {
  bool pin_memory = false;  // pinned CPU memory: faster, asynchronous copies; needs CUDA
};

// PyTorch's torch.autograd.graph.save_on_cpu. In this scope and thread, autograd saves a copy on the CPU of each tensor
// that it needs for backward. Backward copies the tensor back to its device. For a distributed tensor, the local shard
// is copied. Tensors that are on the CPU already are saved as usual.
// Example:  { SaveOnCpu offload({.pin_memory = true});  loss = model(x).sum(); }   loss.backward();
class SaveOnCpu {
 public:
  explicit SaveOnCpu(SaveOnCpuOptions options = {});

 private:
  SavedTensorHooks scope_;
};

}  // namespace tessera
