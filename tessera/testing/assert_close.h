#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

// Comparison of tensors (PyTorch: torch.testing.assert_close).
namespace tessera::testing {

// Tolerances of a comparison.
struct Tolerance {
  double relative = -1;  // -1: the default of the dtype
  double absolute = -1;  // -1: the default of the dtype
};
// The default tolerances of a dtype, as in PyTorch's assertEqual.
Tolerance tolerance_of(c10::ScalarType dtype);

// Returns "" if shapes and dtypes are equal and |actual - expected| <= absolute + relative * |expected| for every
// element. Otherwise returns what differs and where. NaN equals NaN. Device and strides are not compared.
// Example:  EXPECT_EQ(close(y, reference), "");
std::string close(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance = {});
std::string close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                  Tolerance tolerance = {});

// Throws std::runtime_error with that text if the tensors differ.
void assert_close(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance = {});
void assert_close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                  Tolerance tolerance = {});

}  // namespace tessera::testing
