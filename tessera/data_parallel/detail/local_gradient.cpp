#include "tessera/data_parallel/detail/local_gradient.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"

namespace tessera::data_parallel {

const at::Tensor& local_value(const at::Tensor& parameter) {
  return is_dtensor(parameter) ? tessera::detail::local_of(parameter) : parameter;
}

at::Tensor local_gradient(const at::Tensor& gradient, const SpecRef& lies, const std::string& name) {
  TESSERA_CHECK(!gradient.requires_grad(), UsageError, "the gradient of ", name,
                " has a graph of its own (backward with create_graph), which data parallelism cannot reduce: take ",
                "second derivatives of the module that is inside of it");
  TESSERA_CHECK(gradient.layout() == c10::kStrided, UsageError, "the gradient of ", name, " is ", gradient.layout(),
                ", and only dense ones are reduced; make its embedding with sparse(false)");
  if (!lies) {
    TESSERA_CHECK(!is_dtensor(gradient), UsageError, "parameter ", name, " is plain, and its gradient is ",
                  DTensor(gradient), "; distribute the parameter as well");
    return gradient;
  }
  TESSERA_CHECK(is_dtensor(gradient), UsageError, "parameter ", name, " is ", lies->describe(),
                ", and its gradient is a plain tensor of shape ", gradient.sizes(),
                "; give backward() a distributed seed");
  if (DTensor(gradient).placements() == PlacementsRef(lies->placements)) return tessera::detail::local_of(gradient);
  return tessera::detail::local_of(DTensor(gradient).redistribute(lies->mesh, lies->placements));
}

const at::Tensor& local_gradient(const at::Tensor& parameter, const std::string& name) {
  at::Tensor& gradient = parameter.mutable_grad();
  const bool distributed = is_dtensor(parameter);
  const auto lies = distributed ? tessera::detail::meta_of(parameter).spec : SpecRef();
  const auto local = local_gradient(gradient, lies, name);
  if (!distributed) return gradient;
  const auto& spec = *tessera::detail::meta_of(gradient).spec;
  if (!local.is_same(tessera::detail::local_of(gradient)))
    gradient = tessera::detail::wrap(local, with_placements(spec, lies->placements));
  return tessera::detail::local_of(gradient);
}

void set_local_gradient(const at::Tensor& parameter, const at::Tensor& local) {
  if (!is_dtensor(parameter)) {
    parameter.mutable_grad() = local;
    return;
  }
  auto gradient = tessera::detail::wrap(local, tessera::detail::meta_of(parameter).spec);
  tessera::detail::meta_of(gradient).escaped = true;
  parameter.mutable_grad() = std::move(gradient);
}

}  // namespace tessera::data_parallel
