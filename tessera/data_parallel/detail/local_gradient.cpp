#include "tessera/data_parallel/detail/local_gradient.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"

namespace tessera::data_parallel {

at::Tensor local_gradient(const at::Tensor& gradient, const SpecRef& spec, const std::string& name) {
  TESSERA_CHECK(!gradient.requires_grad(), UsageError, "the gradient of ", name,
                " has a graph (backward with create_graph), which data parallelism cannot reduce: compute second ",
                "derivatives with the wrapped module itself");
  TESSERA_CHECK(gradient.layout() == c10::kStrided, UsageError, "the gradient of ", name, " is ", gradient.layout(),
                ", and only dense gradients can be reduced; create its embedding with sparse(false)");
  if (!spec) {
    TESSERA_CHECK(!is_dtensor(gradient), UsageError, "parameter ", name, " is a plain tensor, and its gradient is ",
                  DTensor(gradient), "; distribute the parameter as well");
    return gradient;
  }
  TESSERA_CHECK(is_dtensor(gradient), UsageError, "parameter ", name, " is ", spec->describe(),
                ", and its gradient is a plain tensor of shape ", gradient.sizes(), "; call backward() on a DTensor");
  if (DTensor(gradient).placements() == PlacementsRef(spec->placements)) return tessera::detail::local_of(gradient);
  return tessera::detail::local_of(DTensor(gradient).redistribute(spec->mesh, spec->placements));
}

const at::Tensor& local_gradient(const at::Tensor& parameter, const std::string& name) {
  at::Tensor& gradient = parameter.mutable_grad();
  const bool distributed = is_dtensor(parameter);
  const auto spec = distributed ? tessera::detail::meta_of(parameter).spec : SpecRef();
  const auto local = local_gradient(gradient, spec, name);
  if (!distributed) return gradient;
  const auto& gradient_spec = *tessera::detail::meta_of(gradient).spec;
  if (!local.is_same(tessera::detail::local_of(gradient)))
    gradient = tessera::detail::wrap(local, with_placements(gradient_spec, spec->placements));
  return tessera::detail::local_of(gradient);
}

void set_local_gradient(const at::Tensor& parameter, const at::Tensor& local) {
  if (!is_dtensor(parameter)) {
    parameter.mutable_grad() = local;
    return;
  }
  auto gradient = tessera::detail::wrap(local, tessera::detail::meta_of(parameter).spec);
  tessera::detail::meta_of(gradient).has_plain_alias = true;
  parameter.mutable_grad() = std::move(gradient);
}

}  // namespace tessera::data_parallel
