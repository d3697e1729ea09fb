#pragma once
#include <cstdint>

namespace tessera::data {

// The finalizer of splitmix64: a bijection in which every bit of the result depends on every bit of x. The order of
// samples depends on it, so it must not change between versions and machines.
constexpr uint64_t splitmix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
constexpr uint64_t splitmix64(uint64_t x, uint64_t y) { return splitmix64(splitmix64(x) ^ y); }

}  // namespace tessera::data
