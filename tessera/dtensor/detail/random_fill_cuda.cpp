#include "tessera/dtensor/detail/random_fill_cuda.h"

#include "tessera/base/error.h"
#include "tessera/cuda/detail/kernel.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace tessera::random_ops {
namespace {

// What the headers use of the standard library and of c10. Constructors are called on the host only.
constexpr const char* kLibrary = R"CUDA(
typedef unsigned int uint32_t;
typedef int int32_t;
typedef unsigned long uint64_t;
typedef long int64_t;
#define C10_ALWAYS_INLINE __forceinline__
#define C10_ALWAYS_INLINE_ATTRIBUTE
namespace std {
template <bool kFirst, class A, class B> struct conditional { typedef A type; };
template <class A, class B> struct conditional<false, A, B> { typedef B type; };
template <bool kFirst, class A, class B> using conditional_t = typename conditional<kFirst, A, B>::type;
template <class A, class B> inline constexpr bool is_same_v = false;
template <class A> inline constexpr bool is_same_v<A, A> = true;
template <class T> inline constexpr bool is_integral_v = is_same_v<T, bool> || is_same_v<T, char> ||
    is_same_v<T, signed char> || is_same_v<T, unsigned char> || is_same_v<T, short> || is_same_v<T, int> ||
    is_same_v<T, long>;
template <class To, class From> constexpr To bit_cast(From x) { return __builtin_bit_cast(To, x); }
template <class T> struct numeric_limits { static T lowest(); };
template <> struct numeric_limits<float> {
  static constexpr int digits = 24;
  static constexpr float epsilon() { return 0x1p-23f; }
};
template <> struct numeric_limits<double> {
  static constexpr int digits = 53;
  static constexpr double epsilon() { return 0x1p-52; }
};
inline float sqrt(float x) { return ::sqrtf(x); }
inline double sqrt(double x) { return ::sqrt(x); }
inline float floor(float x) { return ::floorf(x); }
inline double floor(double x) { return ::floor(x); }
inline double ceil(double x) { return ::ceil(x); }
inline float fmin(float a, float b) { return ::fminf(a, b); }
inline double fmin(double a, double b) { return ::fmin(a, b); }
inline float fmax(float a, float b) { return ::fmaxf(a, b); }
inline double fmax(double a, double b) { return ::fmax(a, b); }
inline float ldexp(float x, int e) { return ::ldexpf(x, e); }
inline double ldexp(double x, int e) { return ::ldexp(x, e); }
template <class T> T nextafter(T, T);
template <class T> T min(T, T);
template <class In, class Out> Out copy(In, In, Out);
}
namespace c10 {
struct Half {
  unsigned short bits;
  Half() = default;
  Half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
};
struct BFloat16 {
  unsigned short bits;
  BFloat16() = default;
  BFloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
};
}
)CUDA";

constexpr const char* kPhilox =
#include "philox.inc"
    ;
constexpr const char* kDistributions =
#include "distributions.inc"
    ;

// A block fills a part of one run of consecutive elements. A thread computes one block of random words at a time.
constexpr const char* kFill = R"CUDA(
struct Run {
  int64_t position, index, count;
};
typedef DISTRIBUTION Distribution;
extern "C" __global__ void __launch_bounds__(256)
fill(tessera::philox::Stream stream, Distribution distribution, const Run* runs, Run only, int64_t parts_per_run,
     int64_t blocks_per_part, Distribution::Value* out) {
  const Run run = runs ? runs[blockIdx.x / parts_per_run] : only;
  constexpr int kGroups = 4 / Distribution::kTakes, kElements = kGroups * Distribution::kGives;
  const int64_t begin = run.index / kElements + blockIdx.x % parts_per_run * blocks_per_part;
  const int64_t end = (run.index + run.count + kElements - 1) / kElements;
  for (int64_t i = threadIdx.x; i < blocks_per_part && begin + i < end; i += blockDim.x) {
    uint32_t words[4];
    Distribution::Value some[kElements];
    tessera::philox::make_blocks(stream, (uint64_t)(begin + i), 1, words);
    for (int g = 0; g < kGroups; g++) distribution(words + g * Distribution::kTakes, some + g * Distribution::kGives);
    for (int k = 0; k < kElements; k++) {
      const int64_t at = (begin + i) * kElements + k - run.index;
      if (at >= 0 && at < run.count) out[run.position + at] = some[k];
    }
  }
}
)CUDA";

struct Run {
  int64_t position, index, count;
};

constexpr int64_t kThreads = 256, kBlocksPerPart = 4 * kThreads;  // blocks of random words

struct FillKernel {
  std::string source;
  cuda::Kernel kernel;
  explicit FillKernel(const std::string& distribution)
      : source(fill_source(distribution)), kernel(source.c_str(), "fill", cuda::Rounding::Separate) {}
};

const cuda::Kernel& kernel_for(const std::string& distribution) {
  static std::mutex mutex;
  static auto* kernels = new std::map<std::string, std::unique_ptr<FillKernel>>;
  const std::lock_guard lock(mutex);
  auto& kernel = (*kernels)[distribution];
  if (!kernel) kernel = std::make_unique<FillKernel>(distribution);
  return kernel->kernel;
}

// Copies the runs without waiting for the device: the memory is pinned.
at::Tensor on_device(const std::vector<Run>& runs, c10::Device device) {
  static_assert(sizeof(Run) == 3 * sizeof(int64_t));
  const auto host = at::empty({static_cast<int64_t>(runs.size()), 3}, at::TensorOptions(at::kLong).pinned_memory(true));
  std::memcpy(host.mutable_data_ptr<int64_t>(), runs.data(), runs.size() * sizeof(Run));
  return host.to(device, /*non_blocking=*/true);
}

}  // namespace

bool can_fill_on(c10::Device device) { return cuda::can_launch(device); }

std::string fill_source(const std::string& distribution) {
  return std::string(kLibrary) + kPhilox + kDistributions + "#define DISTRIBUTION " + distribution + "\n" + kFill;
}

void fill_on_cuda(const at::Tensor& out, const LocalIndices& indices, philox::Stream stream, const std::string& name,
                  const void* distribution, size_t bytes) {
  std::vector<Run> runs;
  int64_t longest = 0;
  indices.for_each_range(0, indices.numel(), [&](int64_t position, int64_t index, int64_t count) {
    runs.push_back({position, index, count});
    longest = std::max(longest, count);
  });
  if (runs.empty()) return;
  const auto table = runs.size() == 1 ? at::Tensor() : on_device(runs, out.device());
  // A block of random words has at least one element; the first and the last one of a run can have others
  // around it.
  const int64_t parts = longest / kBlocksPerPart + 2;
  constexpr size_t kMostBytes = 64;
  TESSERA_CHECK(bytes <= kMostBytes, InternalError, name, " has ", bytes, " bytes");
  std::array<std::byte, kMostBytes> copy{};
  std::memcpy(copy.data(), distribution, bytes);
  kernel_for(name).launch(out.device(), {.blocks = parts * static_cast<int64_t>(runs.size()), .threads = kThreads},
                          stream, copy, table.defined() ? table.const_data_ptr() : nullptr, runs[0], parts,
                          kBlocksPerPart, out.mutable_data_ptr());
}

}  // namespace tessera::random_ops
