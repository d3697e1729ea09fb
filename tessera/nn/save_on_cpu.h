#pragma once
#include "tessera/nn/saved_tensor_hooks.h"

namespace tessera {

struct SaveOnCpuOptions {
  bool pin_memory = false;  // faster copies that do not wait; needs CUDA
};

// What autograd saves on this thread while alive waits on the CPU, and comes back to its device when backward needs it.
// Of a distributed tensor this rank's piece does. A tensor that is on the CPU already is saved as usual.
// Example:  { SaveOnCpu offload({.pin_memory = true});  loss = model(x).sum(); }   loss.backward();
class SaveOnCpu {
 public:
  explicit SaveOnCpu(SaveOnCpuOptions options = {});

 private:
  SavedTensorHooks scope_;
};

}  // namespace tessera
