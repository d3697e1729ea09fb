#include "tessera/base/error.h"
#include "tessera/comm/backends.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

// Replaces nccl.cpp in builds without CUDA.
namespace tessera::comm::detail {

int64_t nccl_devices() { return 0; }

c10::intrusive_ptr<c10d::Backend> connect_nccl(const ConnectOptions&) {
  TESSERA_FAIL(UsageError, "this build does not contain nccl; configure with -DTESSERA_CUDA=ON, or use gloo");
}

}  // namespace tessera::comm::detail
