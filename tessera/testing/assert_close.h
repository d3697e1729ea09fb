#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace tessera::testing {

struct Tolerance {
  double relative = -1;  // -1: by dtype, as PyTorch's assertEqual
  double absolute = -1;
};
Tolerance tolerance_of(c10::ScalarType dtype);

// "" if |actual - expected| <= absolute + relative * |expected| everywhere, shapes and dtypes are the same; else what
// differs and where. NaN equals NaN; device and strides do not matter.
// Example:  EXPECT_EQ(close(y, reference), "");
std::string close(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance = {});
std::string close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                  Tolerance tolerance = {});

// The same, thrown.
void assert_close(const at::Tensor& actual, const at::Tensor& expected, Tolerance tolerance = {});
void assert_close(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                  Tolerance tolerance = {});

}  // namespace tessera::testing
