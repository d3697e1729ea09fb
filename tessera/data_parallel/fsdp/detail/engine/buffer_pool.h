#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::data_parallel::fsdp {

// Buffers that come and go all through a step: one that nobody refers to any more is handed out again, because the
// first touch of fresh memory costs more than gathering into it. A buffer of which somebody kept a view stays his.
// There are never more than were in use at one time.
class Arena {
 public:
  at::Tensor take(int64_t numel, const at::TensorOptions& options);
  void clear() { buffers_.clear(); }  // what is in use lives on with its users
  size_t size() const { return buffers_.size(); }

 private:
  std::vector<at::Tensor> buffers_;
};

}  // namespace tessera::data_parallel::fsdp
