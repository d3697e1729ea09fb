#include "tessera/data_parallel/fsdp/detail/engine/buffer_pool.h"

#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/ops/empty.h>

namespace tessera::data_parallel::fsdp {

at::Tensor BufferPool::allocate(int64_t numel, const at::TensorOptions& options) {
  if (compiling()) return at::empty({numel}, options);  // a compiled step plans its own memory
  const auto is_free = [](const at::Tensor& buffer) { return buffer.storage().use_count() == 1; };
  for (auto& buffer : buffers_)
    if (is_free(buffer) && buffer.numel() >= numel && buffer.scalar_type() == options.dtype().toScalarType() &&
        buffer.device() == options.device())
      return buffer.narrow(0, 0, numel);
  std::erase_if(buffers_, is_free);  // too small
  return buffers_.emplace_back(at::empty({numel}, options)).narrow(0, 0, numel);
}

}  // namespace tessera::data_parallel::fsdp
