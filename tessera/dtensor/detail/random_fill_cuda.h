#pragma once
#include "tessera/dtensor/detail/local_indices.h"
#include "tessera/dtensor/detail/philox.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>

#include <string>
#include <type_traits>
#include <typeinfo>

// Random fills on a GPU, with the bits of the CPU: the kernel contains the text of philox.h and distributions.h, and is
// compiled without fused multiply-adds.
namespace tessera::random_ops {

// Can fills run on this device? Otherwise they are made on the host and copied.
bool can_fill_on(c10::Device device);

// The kernel for a distribution, such as "tessera::philox::Normal<float>".
std::string fill_source(const std::string& distribution);

// Fills `out`, contiguous on a GPU, at these global indices. `distribution` has `bytes` bytes and is of the type of
// that name.
void fill_on_cuda(const at::Tensor& out, const LocalIndices& indices, philox::Stream stream, const std::string& name,
                  const void* distribution, size_t bytes);

template <class Distribution>
void fill_on_cuda(const at::Tensor& out, const LocalIndices& indices, philox::Stream stream,
                  const Distribution& distribution) {
  static_assert(std::is_trivially_copyable_v<Distribution>);
  fill_on_cuda(out, indices, stream, c10::demangle(typeid(Distribution).name()), &distribution, sizeof(distribution));
}

}  // namespace tessera::random_ops
