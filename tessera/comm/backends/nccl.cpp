// Built with TESSERA_CUDA=ON. Other builds use no_nccl.cpp.
#define USE_C10D_NCCL 1
#include "tessera/comm/backends.h"

#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace tessera::comm::detail {

int64_t nccl_devices() { return c10::cuda::device_count(); }

c10::intrusive_ptr<c10d::Backend> connect_nccl(const ConnectOptions& options) {
  using c10d::ProcessGroupNCCL;
  auto nccl = ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  nccl->group_name = options.group;
  nccl->global_ranks_in_group.assign(options.ranks.begin(), options.ranks.end());
  return c10::make_intrusive<ProcessGroupNCCL>(options.store, options.rank, options.size, nccl);
}

}  // namespace tessera::comm::detail
