#include <ATen/core/Tensor.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/max.h>
#include <ATen/ops/min.h>
#include <ATen/ops/norm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

// Reductions of local tensors whose results are partial (rules/reduction.cpp). Each op takes the arguments of the aten
// op. The means also take the number of reduced elements of the global tensor.
namespace tessera {
namespace {

using Dims = at::OptionalIntArrayRef;

// The local sum divided by the global count.
at::Tensor mean_of_dim(const at::Tensor& self, Dims dim, bool keepdim, std::optional<at::ScalarType> dtype,
                       double count) {
  auto result_type = dtype.value_or(self.scalar_type());
  TORCH_CHECK(at::isFloatingType(result_type) || at::isComplexType(result_type), "mean: the result cannot have dtype ",
              result_type, "; give a floating dtype");
  return at::sum(self, dim, keepdim, dtype).div_(count);
}

at::Tensor mean_of(const at::Tensor& self, std::optional<at::ScalarType> dtype, double count) {
  return mean_of_dim(self, std::nullopt, false, dtype, count);
}

// The identity element of max: the lowest value of the type.
at::Scalar identity_of_max(at::ScalarType type) {
  if (at::isFloatingType(type)) return -std::numeric_limits<double>::infinity();
  if (type == at::kBool) return false;
  switch (type) {
    case at::kByte:
      return 0;
    case at::kChar:
      return std::numeric_limits<int8_t>::lowest();
    case at::kShort:
      return std::numeric_limits<int16_t>::lowest();
    case at::kInt:
      return std::numeric_limits<int32_t>::lowest();
    default:
      return std::numeric_limits<int64_t>::lowest();
  }
}

// The identity element of min: the highest value of the type.
at::Scalar identity_of_min(at::ScalarType type) {
  if (at::isFloatingType(type)) return std::numeric_limits<double>::infinity();
  if (type == at::kBool) return true;
  switch (type) {
    case at::kByte:
      return std::numeric_limits<uint8_t>::max();
    case at::kChar:
      return std::numeric_limits<int8_t>::max();
    case at::kShort:
      return std::numeric_limits<int16_t>::max();
    case at::kInt:
      return std::numeric_limits<int32_t>::max();
    default:
      return std::numeric_limits<int64_t>::max();
  }
}

// The sizes after reduction over `dim` (empty: over all dims).
std::vector<int64_t> reduced_sizes(const at::Tensor& self, at::IntArrayRef dim, bool keepdim) {
  std::vector<bool> reduced(static_cast<size_t>(self.dim()), dim.empty());
  for (auto d : dim) reduced[static_cast<size_t>(d < 0 ? d + self.dim() : d)] = true;
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < self.dim(); d++) {
    if (!reduced[static_cast<size_t>(d)])
      sizes.push_back(self.size(d));
    else if (keepdim)
      sizes.push_back(1);
  }
  return sizes;
}

at::Tensor amax_or_lowest(const at::Tensor& self, at::IntArrayRef dim, bool keepdim) {
  if (self.numel() > 0) return at::amax(self, dim, keepdim);
  return at::full(reduced_sizes(self, dim, keepdim), identity_of_max(self.scalar_type()), self.options());
}

at::Tensor amin_or_highest(const at::Tensor& self, at::IntArrayRef dim, bool keepdim) {
  if (self.numel() > 0) return at::amin(self, dim, keepdim);
  return at::full(reduced_sizes(self, dim, keepdim), identity_of_min(self.scalar_type()), self.options());
}

std::tuple<at::Tensor, at::Tensor> aminmax_or_extremes(const at::Tensor& self, std::optional<int64_t> dim,
                                                       bool keepdim) {
  if (self.numel() > 0) return at::aminmax(self, dim, keepdim);
  std::vector<int64_t> dims;
  if (dim) dims.push_back(*dim);
  return {amin_or_highest(self, dims, keepdim), amax_or_lowest(self, dims, keepdim)};
}

at::Tensor max_or_lowest(const at::Tensor& self) {
  return self.numel() > 0 ? at::max(self) : amax_or_lowest(self, {}, false);
}
at::Tensor min_or_highest(const at::Tensor& self) {
  return self.numel() > 0 ? at::min(self) : amin_or_highest(self, {}, false);
}

// The norm of an empty local tensor is zero. For every p > 0 it does not change the p-norm over all ranks.
at::Tensor zeros_for(const at::Tensor& self, at::IntArrayRef dim, bool keepdim, std::optional<at::ScalarType> dtype) {
  const auto type = c10::toRealValueType(dtype.value_or(self.scalar_type()));
  return at::zeros(reduced_sizes(self, dim, keepdim), self.options().dtype(type));
}

at::Tensor norm_or_zero(const at::Tensor& self, const at::Scalar& p) {
  return self.numel() > 0 ? at::norm(self, p) : zeros_for(self, {}, false, std::nullopt);
}
at::Tensor norm_or_zero_dtype(const at::Tensor& self, const std::optional<at::Scalar>& p, at::ScalarType dtype) {
  return self.numel() > 0 ? at::norm(self, p, dtype) : zeros_for(self, {}, false, dtype);
}
at::Tensor norm_or_zero_dim(const at::Tensor& self, const std::optional<at::Scalar>& p, at::IntArrayRef dim,
                            bool keepdim) {
  return self.numel() > 0 ? at::norm(self, p, dim, keepdim) : zeros_for(self, dim, keepdim, std::nullopt);
}
at::Tensor norm_or_zero_dim_dtype(const at::Tensor& self, const std::optional<at::Scalar>& p, at::IntArrayRef dim,
                                  bool keepdim, at::ScalarType dtype) {
  return self.numel() > 0 ? at::norm(self, p, dim, keepdim, dtype) : zeros_for(self, dim, keepdim, dtype);
}
at::Tensor vector_norm_or_zero(const at::Tensor& self, const at::Scalar& ord, Dims dim, bool keepdim,
                               std::optional<at::ScalarType> dtype) {
  if (self.numel() > 0) return at::linalg_vector_norm(self, ord, dim, keepdim, dtype);
  return zeros_for(self, dim.value_or(at::IntArrayRef{}), keepdim, dtype);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("mean_of(Tensor self, ScalarType? dtype, float count) -> Tensor");
  m.def("mean_of.dim(Tensor self, int[1]? dim, bool keepdim, ScalarType? dtype, float count) -> Tensor");
  m.def("amax_or_lowest(Tensor self, int[1] dim, bool keepdim) -> Tensor");
  m.def("amin_or_highest(Tensor self, int[1] dim, bool keepdim) -> Tensor");
  m.def("aminmax_or_extremes(Tensor self, int? dim, bool keepdim) -> (Tensor, Tensor)");
  m.def("max_or_lowest(Tensor self) -> Tensor");
  m.def("min_or_highest(Tensor self) -> Tensor");
  m.def("norm_or_zero(Tensor self, Scalar p) -> Tensor");
  m.def("norm_or_zero.dtype(Tensor self, Scalar? p, ScalarType dtype) -> Tensor");
  m.def("norm_or_zero.dim(Tensor self, Scalar? p, int[1] dim, bool keepdim) -> Tensor");
  m.def("norm_or_zero.dim_dtype(Tensor self, Scalar? p, int[1] dim, bool keepdim, ScalarType dtype) -> Tensor");
  m.def("vector_norm_or_zero(Tensor self, Scalar ord, int[1]? dim, bool keepdim, ScalarType? dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("mean_of", mean_of);
  m.impl("mean_of.dim", mean_of_dim);
  m.impl("amax_or_lowest", amax_or_lowest);
  m.impl("amin_or_highest", amin_or_highest);
  m.impl("aminmax_or_extremes", aminmax_or_extremes);
  m.impl("max_or_lowest", max_or_lowest);
  m.impl("min_or_highest", min_or_highest);
  m.impl("norm_or_zero", norm_or_zero);
  m.impl("norm_or_zero.dtype", norm_or_zero_dtype);
  m.impl("norm_or_zero.dim", norm_or_zero_dim);
  m.impl("norm_or_zero.dim_dtype", norm_or_zero_dim_dtype);
  m.impl("vector_norm_or_zero", vector_norm_or_zero);
}

}  // namespace tessera
