#include "tessera/tensor_parallel/detail/check_comparison.h"

#include "tessera/dtensor/dtensor.h"
#include "tessera/placement/detail/take_ranges.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/view_as_real.h>

#include <limits>

namespace tessera {
namespace {

// How much a value may differ, relative to the largest value of the tensor, and of all tensors of its kind: a gradient
// that is zero but for rounding has no scale of its own.
struct CheckTolerance {
  double own, all;
};
CheckTolerance check_tolerance(at::ScalarType dtype) {
  if (dtype == at::kDouble || dtype == at::kComplexDouble) return {1e-7, 1e-11};
  if (dtype == at::kHalf || dtype == at::kBFloat16) return {5e-2, 1e-2};
  return {1e-3, 3e-6};
}

at::Tensor comparable(const at::Tensor& t) {
  const auto value = t.detach();
  return (value.is_complex() ? at::view_as_real(value.resolve_conj()) : value).to(at::kDouble);
}
// The largest difference of two elements; infinity for other sizes.
double difference_of(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return std::numeric_limits<double>::infinity();
  if (a.numel() == 0) return 0;
  const auto x = comparable(a), y = comparable(b);
  const auto differs = x.ne(y).logical_and(x.isnan().logical_and(y.isnan()).logical_not());
  const auto largest = (x - y).abs().masked_fill(differs.logical_not(), 0).max().item<double>();
  return largest == largest ? largest : std::numeric_limits<double>::infinity();
}

at::Tensor local_tensor_of(const at::Tensor& full, const Placement& placement, const DeviceMesh& mesh) {
  const auto p = normalize({placement}, full.dim())[0];
  if (!p.is_sharded()) return full;
  const auto rank = mesh.get_coordinate()->at(0);
  return take_ranges(full, p.dim, shard_ranges(p, full.size(p.dim), mesh.size(), rank));
}

}  // namespace

double largest_of(const at::Tensor& t) {
  return t.defined() && t.numel() > 0 ? comparable(t).nan_to_num(0, 0, 0).abs().max().item<double>() : 0;
}

Compared compare(const Comparison& c, const DeviceMesh& mesh) {
  at::NoGradGuard no_grad;
  Compared result;
  at::Tensor found = c.found;
  auto allowed = c.allowed;
  if (is_dtensor(found)) {
    const DTensor d(found.detach());
    if (d.sizes() != c.plain.sizes()) return {0, std::numeric_limits<double>::infinity()};
    const bool here = d.device_mesh() == mesh && !d.placements()[0].is_partial();
    found = here ? d.to_local() : d.full_tensor();
    allowed = {here ? d.placements()[0] : Replicate()};
  }
  const auto [own, all] = check_tolerance(c.plain.scalar_type());
  const auto largest = largest_of(c.plain);
  const auto most = own * largest + all * c.scale;
  for (size_t i = 0; i < allowed.size(); i++) {
    if (allowed[i].is_partial()) result.matches |= uint64_t{1} << i;  // what uses it is compared
    if (allowed[i].is_partial() || (allowed[i].is_sharded() && allowed[i].dim >= c.plain.dim())) continue;
    const auto difference = difference_of(found, local_tensor_of(c.plain, allowed[i], mesh));
    if (difference <= most) result.matches |= uint64_t{1} << i;
    if (i == 0) result.difference = largest > 0 ? difference / largest : difference;
  }
  if (allowed.empty()) result.matches = ~uint64_t{0};
  return result;
}

}  // namespace tessera
