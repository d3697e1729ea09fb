#include "tessera/dtensor/detail/random_ops.h"

#include "tessera/base/detail/parallel.h"
#include "tessera/base/error.h"
#include "tessera/dtensor/detail/distributions.h"
#include "tessera/dtensor/detail/local_indices.h"
#include "tessera/dtensor/detail/philox.h"
#include "tessera/dtensor/detail/random_fill_cuda.h"

#include <ATen/Dispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <torch/library.h>

#include <vector>

namespace tessera::random_ops {
namespace {

using at::IntArrayRef;
using at::Tensor;

// The minimum number of elements per thread.
constexpr int64_t kGrainSize = 1 << 15;

// Calls write(tensor, indices) on contiguous memory of `device`, then copies to `self` if that is elsewhere. So values
// do not depend on device or layout.
template <class Write>
Tensor& write_on(c10::Device device, Tensor& self, const char* op, const Draw& draw, Write write) {
  const LocalIndices indices(draw.sizes, draw.ranges);
  TESSERA_CHECK(indices.numel() == self.numel(), InternalError, op, ": the tensor has sizes ", self.sizes(),
                ", but the ranges in global sizes ", draw.sizes, " have ", indices.numel(), " elements");
  if (self.is_meta() || self.numel() == 0) return self;
  if (self.device() == device && self.is_contiguous()) {
    write(self, indices);
    return self;
  }
  auto written = at::empty(self.sizes(), self.options().device(device).memory_format(at::MemoryFormat::Contiguous));
  write(written, indices);
  return self.copy_(written);
}
c10::Device device_of_fill(const Tensor& self) { return can_fill_on(self.device()) ? self.device() : at::kCPU; }

// `tensor`: contiguous, on the CPU or where can_fill_on().
template <class Distribution>
void fill(const Tensor& tensor, const LocalIndices& indices, const Draw& draw, const Distribution& distribution) {
  const philox::Stream stream{static_cast<uint64_t>(draw.seed), static_cast<uint64_t>(draw.offset)};
  if (!tensor.is_cpu()) return fill_on_cuda(tensor, indices, stream, distribution);
  auto* out = static_cast<typename Distribution::Value*>(tensor.mutable_data_ptr());
  parallel_for(0, indices.numel(), kGrainSize, [&](int64_t begin, int64_t end) {
    indices.for_each_range(begin, end, [&](int64_t position, int64_t index, int64_t count) {
      philox::fill(stream, distribution, index, count, out + position);
    });
  });
}

// Fills a floating-point tensor from D<scalar_t>(args...).
template <template <class> class D, class... Args>
Tensor& fill_floating(Tensor& self, const char* op, const Draw& draw, Args... args) {
  return write_on(device_of_fill(self), self, op, draw, [&](Tensor& out, const LocalIndices& indices) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "philox",
                                    [&] { fill(out, indices, draw, D<scalar_t>(args...)); });
  });
}

// ---- kernels ----

Tensor& uniform_kernel(Tensor& self, double from, double to, int64_t seed, int64_t offset, IntArrayRef sizes,
                       IntArrayRef ranges) {
  TESSERA_CHECK(from <= to, UsageError, "uniform_ from ", from, " to ", to, ": give the lower bound first");
  return fill_floating<philox::Uniform>(self, "uniform_", {seed, offset, sizes, ranges}, from, to);
}

Tensor& normal_kernel(Tensor& self, double mean, double std, int64_t seed, int64_t offset, IntArrayRef sizes,
                      IntArrayRef ranges) {
  TESSERA_CHECK(std >= 0, UsageError, "normal_ with std ", std, ": give a std that is not negative");
  if (!self.is_complex())
    return fill_floating<philox::Normal>(self, "normal_", {seed, offset, sizes, ranges}, mean, std);
  // Real and imaginary part share the variance. They are one more dim, which is not sharded.
  std::vector<int64_t> real_sizes(sizes.begin(), sizes.end()), real_ranges(ranges.begin(), ranges.end());
  real_sizes.push_back(2);
  if (!ranges.empty()) real_ranges.insert(real_ranges.end(), {1, 0, 2});
  auto real = at::view_as_real(self);
  fill_floating<philox::Normal>(real, "normal_", {seed, offset, real_sizes, real_ranges}, 0.0, std / std::sqrt(2.0));
  return self.add_(mean);
}

Tensor& log_normal_kernel(Tensor& self, double mean, double std, int64_t seed, int64_t offset, IntArrayRef sizes,
                          IntArrayRef ranges) {
  TESSERA_CHECK(std > 0, UsageError, "log_normal_ with std ", std, ": give a positive one");
  return fill_floating<philox::LogNormal>(self, "log_normal_", {seed, offset, sizes, ranges}, mean, std);
}

Tensor& exponential_kernel(Tensor& self, double lambda, int64_t seed, int64_t offset, IntArrayRef sizes,
                           IntArrayRef ranges) {
  TESSERA_CHECK(lambda > 0, UsageError, "exponential_ with lambd ", lambda, ": give a positive one");
  return fill_floating<philox::Exponential>(self, "exponential_", {seed, offset, sizes, ranges}, lambda);
}

Tensor& cauchy_kernel(Tensor& self, double median, double sigma, int64_t seed, int64_t offset, IntArrayRef sizes,
                      IntArrayRef ranges) {
  TESSERA_CHECK(sigma > 0, UsageError, "cauchy_ with sigma ", sigma, ": give a positive one");
  return fill_floating<philox::Cauchy>(self, "cauchy_", {seed, offset, sizes, ranges}, median, sigma);
}

Tensor& geometric_kernel(Tensor& self, double p, int64_t seed, int64_t offset, IntArrayRef sizes, IntArrayRef ranges) {
  TESSERA_CHECK(p > 0 && p < 1, UsageError, "geometric_ with p ", p, ": give one between 0 and 1");
  const Draw draw{seed, offset, sizes, ranges};
  return write_on(device_of_fill(self), self, "geometric_", draw, [&](Tensor& out, const LocalIndices& indices) {
    AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "geometric_",
                               [&] { fill(out, indices, draw, philox::Geometric<scalar_t>(p)); });
  });
}

void check_probability(double p, const char* op) {
  TESSERA_CHECK(p >= 0 && p <= 1, UsageError, op, " with p ", p, ": a probability is between 0 and 1");
}

Tensor& bernoulli_kernel(Tensor& self, double p, int64_t seed, int64_t offset, IntArrayRef sizes, IntArrayRef ranges) {
  check_probability(p, "bernoulli_");
  if (p == 0) return self.zero_();
  const Draw draw{seed, offset, sizes, ranges};
  return write_on(device_of_fill(self), self, "bernoulli_", draw, [&](Tensor& out, const LocalIndices& indices) {
    AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, out.scalar_type(), "bernoulli_",
                               [&] { fill(out, indices, draw, philox::Bernoulli<scalar_t>(p)); });
  });
}

Tensor& bernoulli_tensor_kernel(Tensor& self, const Tensor& p, int64_t seed, int64_t offset, IntArrayRef sizes,
                                IntArrayRef ranges) {
  TESSERA_CHECK(p.sizes() == self.sizes(), InternalError, "bernoulli_: sizes ", self.sizes(), ", probabilities ",
                p.sizes());
  const Draw draw{seed, offset, sizes, ranges};
  const auto chances = p.to(at::kCPU, at::kDouble).contiguous();
  return write_on(at::kCPU, self, "bernoulli_", draw, [&](Tensor& host, const LocalIndices& indices) {
    auto words = at::empty(host.sizes(), at::kInt);
    const auto* word = reinterpret_cast<const uint32_t*>(words.const_data_ptr<int32_t>());
    const auto* chance = chances.const_data_ptr<double>();
    for (int64_t i = 0; i < chances.numel(); i++) check_probability(chance[i], "bernoulli_");
    fill(words, indices, draw, philox::Word());
    AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, host.scalar_type(), "bernoulli_", [&] {
      auto* out = host.mutable_data_ptr<scalar_t>();
      for (int64_t i = 0; i < host.numel(); i++)
        out[i] = static_cast<scalar_t>(philox::below(word[i], chance[i]) ? 1 : 0);
    });
  });
}

Tensor& integers_kernel(Tensor& self, int64_t from, int64_t range, int64_t seed, int64_t offset, IntArrayRef sizes,
                        IntArrayRef ranges) {
  const Draw draw{seed, offset, sizes, ranges};
  const auto unsigned_range = static_cast<uint64_t>(range);
  return write_on(device_of_fill(self), self, "random_", draw, [&](Tensor& out, const LocalIndices& indices) {
    AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, out.scalar_type(), "random_", [&] {
      if (unsigned_range != 0 && unsigned_range <= uint64_t{1} << 32)
        fill(out, indices, draw, philox::Integer32<scalar_t>{from, unsigned_range});
      else
        fill(out, indices, draw, philox::Integer64<scalar_t>{from, unsigned_range});
    });
  });
}

std::tuple<Tensor, Tensor> dropout_kernel(const Tensor& self, double p, int64_t seed, int64_t offset, IntArrayRef sizes,
                                          IntArrayRef ranges) {
  check_probability(p, "native_dropout");
  const double keep = 1 - p, scale = keep == 0 ? 0 : 1 / keep;
  auto mask = at::empty(self.sizes(), self.options().dtype(at::kBool).memory_format(at::MemoryFormat::Contiguous));
  bernoulli_kernel(mask, keep, seed, offset, sizes, ranges);
  if (!self.is_cpu() || !self.is_contiguous() || !at::isFloatingType(self.scalar_type()))
    return {self.mul(mask).mul_(scale), mask};
  // The same arithmetic in one pass. x * mask is exact, so there is one rounding.
  auto out = at::empty_like(self);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "native_dropout", [&] {
    using R = philox::Math<scalar_t>;
    const auto* x = self.const_data_ptr<scalar_t>();
    const auto* m = mask.const_data_ptr<bool>();
    auto* y = out.mutable_data_ptr<scalar_t>();
    parallel_for(0, self.numel(), kGrainSize, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        y[i] = static_cast<scalar_t>(static_cast<R>(x[i]) * static_cast<R>(m[i]) * static_cast<R>(scale));
    });
  });
  return {out, mask};
}

// ---- calls through the dispatcher ----

template <class... Args>
using Fill = Tensor&(Tensor&, Args..., int64_t, int64_t, IntArrayRef, IntArrayRef);

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

void uniform_(Tensor& local, double from, double to, const Draw& d) {
  static const auto op = find<Fill<double, double>>("tessera::philox_uniform_");
  op.call(local, from, to, d.seed, d.offset, d.sizes, d.ranges);
}
void normal_(Tensor& local, double mean, double std, const Draw& d) {
  static const auto op = find<Fill<double, double>>("tessera::philox_normal_");
  op.call(local, mean, std, d.seed, d.offset, d.sizes, d.ranges);
}
void log_normal_(Tensor& local, double mean, double std, const Draw& d) {
  static const auto op = find<Fill<double, double>>("tessera::philox_log_normal_");
  op.call(local, mean, std, d.seed, d.offset, d.sizes, d.ranges);
}
void exponential_(Tensor& local, double lambda, const Draw& d) {
  static const auto op = find<Fill<double>>("tessera::philox_exponential_");
  op.call(local, lambda, d.seed, d.offset, d.sizes, d.ranges);
}
void cauchy_(Tensor& local, double median, double sigma, const Draw& d) {
  static const auto op = find<Fill<double, double>>("tessera::philox_cauchy_");
  op.call(local, median, sigma, d.seed, d.offset, d.sizes, d.ranges);
}
void geometric_(Tensor& local, double p, const Draw& d) {
  static const auto op = find<Fill<double>>("tessera::philox_geometric_");
  op.call(local, p, d.seed, d.offset, d.sizes, d.ranges);
}
void bernoulli_(Tensor& local, double p, const Draw& d) {
  static const auto op = find<Fill<double>>("tessera::philox_bernoulli_");
  op.call(local, p, d.seed, d.offset, d.sizes, d.ranges);
}
void bernoulli_(Tensor& local, const Tensor& p, const Draw& d) {
  static const auto op = find<Fill<const Tensor&>>("tessera::philox_bernoulli_tensor_");
  op.call(local, p, d.seed, d.offset, d.sizes, d.ranges);
}
void integers_(Tensor& local, int64_t from, int64_t range, const Draw& d) {
  static const auto op = find<Fill<int64_t, int64_t>>("tessera::philox_integers_");
  op.call(local, from, range, d.seed, d.offset, d.sizes, d.ranges);
}
std::tuple<Tensor, Tensor> dropout(const Tensor& local, double p, const Draw& d) {
  static const auto op =
      find<std::tuple<Tensor, Tensor>(const Tensor&, double, int64_t, int64_t, IntArrayRef, IntArrayRef)>(
          "tessera::philox_dropout");
  return op.call(local, p, d.seed, d.offset, d.sizes, d.ranges);
}

namespace {

TORCH_LIBRARY_FRAGMENT(tessera, m) {
#define TESSERA_DRAW "int seed, int offset, int[] global_sizes, int[] ranges"
  constexpr auto kAnyDevice = c10::DispatchKey::CompositeExplicitAutograd;
  const auto op = [&](const char* schema, auto kernel) { m.def(schema, torch::dispatch(kAnyDevice, kernel)); };
  op("philox_uniform_(Tensor(a!) self, float from, float to, " TESSERA_DRAW ") -> Tensor(a!)",
     TORCH_FN(uniform_kernel));
  op("philox_normal_(Tensor(a!) self, float mean, float std, " TESSERA_DRAW ") -> Tensor(a!)", TORCH_FN(normal_kernel));
  op("philox_log_normal_(Tensor(a!) self, float mean, float std, " TESSERA_DRAW ") -> Tensor(a!)",
     TORCH_FN(log_normal_kernel));
  op("philox_exponential_(Tensor(a!) self, float lambd, " TESSERA_DRAW ") -> Tensor(a!)", TORCH_FN(exponential_kernel));
  op("philox_cauchy_(Tensor(a!) self, float median, float sigma, " TESSERA_DRAW ") -> Tensor(a!)",
     TORCH_FN(cauchy_kernel));
  op("philox_geometric_(Tensor(a!) self, float p, " TESSERA_DRAW ") -> Tensor(a!)", TORCH_FN(geometric_kernel));
  op("philox_bernoulli_(Tensor(a!) self, float p, " TESSERA_DRAW ") -> Tensor(a!)", TORCH_FN(bernoulli_kernel));
  op("philox_bernoulli_tensor_(Tensor(a!) self, Tensor p, " TESSERA_DRAW ") -> Tensor(a!)",
     TORCH_FN(bernoulli_tensor_kernel));
  op("philox_integers_(Tensor(a!) self, int from, int range, " TESSERA_DRAW ") -> Tensor(a!)",
     TORCH_FN(integers_kernel));
  op("philox_dropout(Tensor self, float p, " TESSERA_DRAW ") -> (Tensor, Tensor)", TORCH_FN(dropout_kernel));
#undef TESSERA_DRAW
}

}  // namespace
}  // namespace tessera::random_ops
