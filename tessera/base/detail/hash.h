#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

// The hash functions of this library. Values are equal on all ranks and in all runs of one build; they are not stored.
namespace tessera {

// Adds one 64-bit word to a hash. The order of the words counts. One multiplication (128-bit product, folded).
//
//   uint64_t h = 0;
//   for (int64_t size : sizes) h = hash_combine(h, static_cast<uint64_t>(size));
//
// Start with a constant or with a hash: a small start value and a small word would cancel each other.
constexpr uint64_t hash_combine(uint64_t hash, uint64_t word) {
  const auto product = static_cast<unsigned __int128>(hash ^ word ^ 0x9E3779B97F4A7C15ull) * 0xD6E8FEB86659FD93ull;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}
inline uint64_t hash_combine(uint64_t hash, const void* address) {
  return hash_combine(hash, static_cast<uint64_t>(reinterpret_cast<uintptr_t>(address)));
}

// The hash of `size` bytes. For floating-point data: NaNs with equal bits are equal, 0.0 and -0.0 differ.
inline uint64_t hash_bytes(const void* data, size_t size) {
  const auto* at = static_cast<const char*>(data);
  uint64_t hash = size;
  while (size > 0) {
    uint64_t word = 0;
    const size_t bytes = size < sizeof(word) ? size : sizeof(word);
    std::memcpy(&word, at, bytes);
    hash = hash_combine(hash, word);
    at += bytes;
    size -= bytes;
  }
  return hash;
}

}  // namespace tessera
