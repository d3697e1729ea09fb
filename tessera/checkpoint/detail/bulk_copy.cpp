#include "tessera/checkpoint/detail/bulk_copy.h"

#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace tessera::dcp {
namespace {

constexpr size_t kCacheBytes = 1 << 20;  // less than this stays in the caches

#ifdef __SSE2__

void copy_past_caches(std::byte* to, const std::byte* from, size_t bytes) {
  constexpr size_t kLine = 64, kVector = sizeof(__m128i);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
    __m128i line[kLine / kVector];
    std::memcpy(line, from, kLine);
    for (size_t i = 0; i < kLine / kVector; i++)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i * kVector), line[i]);
  }
  _mm_sfence();
  std::memcpy(to, from, bytes);
}

#else

void copy_past_caches(std::byte* to, const std::byte* from, size_t bytes) { std::memcpy(to, from, bytes); }

#endif

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_neg() &&
         !tensor.is_inference();
}

}  // namespace

void bulk_copy(const at::Tensor& to, const at::Tensor& from) {
  if (from.nbytes() < kCacheBytes || to.scalar_type() != from.scalar_type() || !to.sizes().equals(from.sizes()) ||
      !is_plain_memory(to) || !is_plain_memory(from)) {
    to.copy_(from);
    return;
  }
  copy_past_caches(static_cast<std::byte*>(to.mutable_data_ptr()), static_cast<const std::byte*>(from.const_data_ptr()),
                   from.nbytes());
  to.unsafeGetTensorImpl()->bump_version();  // as copy_ does: autograd notices a write to a saved tensor
}

}  // namespace tessera::dcp
