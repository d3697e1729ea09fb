#include "tessera/state/detail/fit_value.h"

#include "tessera/dtensor/dtensor.h"

namespace tessera::detail {

at::Tensor fit_value(const at::Tensor& value, const at::Tensor& like) {
  if (!is_dtensor(like)) return is_dtensor(value) ? DTensor(value.detach()).full_tensor() : value.detach();
  const DTensor target(like);
  const auto mesh = target.device_mesh();
  if (is_dtensor(value) && DTensor(value).device_mesh() == mesh)
    return DTensor(value.detach()).redistribute(target.placements());
  auto full = is_dtensor(value) ? DTensor(value.detach()).full_tensor() : value.detach();
  if (like.is_meta())
    full = full.to(c10::Device(mesh.device_type()));
  else
    full = full.to(like.device());
  return distribute_tensor(full, mesh, target.placements(), {.src_data_rank = std::nullopt});
}

std::string why_no_fit(const at::Tensor& value, const at::Tensor& like) {
  if (value.is_meta()) return "the value is on the meta device, so it has no values to load";
  if (is_dtensor(like) && DTensor(like).spec().has_partial())
    return c10::str("it is ", DTensor(like).spec().describe(), ", which is partial: redistribute it first");
  return "";
}

}  // namespace tessera::detail
