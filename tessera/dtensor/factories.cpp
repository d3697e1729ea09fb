#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/dtensor/register.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cmath>

namespace tessera {
namespace {

// A DTensor of global `size` with an uninitialized local tensor.
DTensor uninitialized(c10::IntArrayRef size, const DeviceMesh& mesh, PlacementsRef placements,
                      const at::TensorOptions& options, const char* function) {
  detail::register_kernels();
  TESSERA_CHECK(mesh, UsageError, function, ": no mesh given");
  TESSERA_CHECK(options.layout() == at::kStrided && !options.pinned_memory() && !options.memory_format_opt(),
                UsageError, function, ": a DTensor supports only the options dtype, device and requires_grad");
  const Placements replicated(mesh.ndim(), Replicate());
  const auto to =
      normalize(placements.empty() ? PlacementsRef(replicated) : placements, static_cast<int64_t>(size.size()));
  for (const auto& p : to)
    TESSERA_CHECK(!p.is_partial(), UsageError, function, " with ", to_string(to),
                  ": a placement must not be Partial; write Replicate or Shard");
  const auto device = options.device_opt().value_or(c10::Device(mesh.device_type()));
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  auto spec = intern(mesh, to, size, tessera::contiguous_strides(size), dtype, device);
  auto local = at::empty(spec->local_sizes, at::TensorOptions().dtype(dtype).device(device));
  auto out = detail::wrap(std::move(local), std::move(spec));
  out.set_requires_grad(options.requires_grad());
  return out;
}

template <class Fill>
DTensor filled(DTensor t, Fill fill) {
  at::NoGradGuard no_grad;
  fill(t);
  return t;
}

}  // namespace

DTensor empty(c10::IntArrayRef size, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options) {
  return uninitialized(size, mesh, placements, options, "empty");
}
DTensor full(c10::IntArrayRef size, const at::Scalar& value, const DeviceMesh& mesh, PlacementsRef placements,
             at::TensorOptions options) {
  if (!options.has_dtype() && (value.isIntegral(false) || value.isBoolean()))
    options = options.dtype(value.isBoolean() ? at::kBool : at::kLong);
  return filled(uninitialized(size, mesh, placements, options, "full"),
                [&](auto& t) { detail::local_of(t).fill_(value); });
}
DTensor zeros(c10::IntArrayRef size, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options) {
  return filled(uninitialized(size, mesh, placements, options, "zeros"), [](auto& t) { detail::local_of(t).zero_(); });
}
DTensor ones(c10::IntArrayRef size, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options) {
  return filled(uninitialized(size, mesh, placements, options, "ones"), [](auto& t) { detail::local_of(t).fill_(1); });
}
DTensor rand(c10::IntArrayRef size, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options) {
  return filled(uninitialized(size, mesh, placements, options, "rand"), [](auto& t) { random::uniform_(t, 0, 1); });
}
DTensor randn(c10::IntArrayRef size, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options) {
  return filled(uninitialized(size, mesh, placements, options, "randn"), [](auto& t) { random::normal_(t, 0, 1); });
}
DTensor arange(const at::Scalar& end, const DeviceMesh& mesh, PlacementsRef placements, at::TensorOptions options) {
  if (!options.has_dtype() && end.isIntegral(false)) options = options.dtype(at::kLong);
  const auto size = static_cast<int64_t>(std::ceil(end.toDouble()));
  return filled(uninitialized({size}, mesh, placements, options, "arange"), [](DTensor& t) {
    std::vector<at::Tensor> parts;
    for (const auto& range : t.spec().local_ranges(0))
      parts.push_back(at::arange(range.begin, range.end, detail::local_of(t).options()));
    if (!parts.empty()) detail::local_of(t).copy_(at::cat(parts));
  });
}

}  // namespace tessera
