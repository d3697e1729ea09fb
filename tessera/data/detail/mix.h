#pragma once
#include <cstdint>

namespace tessera::data {

// Every bit of the result depends on every bit of x, and no two x give the same (the finaliser of splitmix64).
constexpr uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
constexpr uint64_t mix(uint64_t x, uint64_t y) { return mix(mix(x) ^ y); }

}  // namespace tessera::data
