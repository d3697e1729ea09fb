#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::data_parallel::fsdp {

// Reuses all-gather output buffers within a step. The first touch of fresh memory costs more than the all-gather.
// A buffer is free when the pool has the only reference to its storage. A buffer that has a view stays in use.
// The pool holds at most as many buffers as were in use at one time.
class BufferPool {
 public:
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options);  // 1-D, not initialized
  void clear() { buffers_.clear(); }  // buffers in use stay alive through their users' references
  size_t size() const { return buffers_.size(); }

 private:
  std::vector<at::Tensor> buffers_;
};

}  // namespace tessera::data_parallel::fsdp
