#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::compiler {

// The dtype, sizes, strides and device of a tensor in a program.
//   f32[128, 50]            contiguous, on the CPU
//   f32[50, 32]{1, 50}      with these strides
//   bf16[4] cuda:0          on another device
//   c64[4] conj             a lazy conjugate: the memory has the other sign. Also "neg" and "conj neg"
struct Type {
  c10::ScalarType dtype = c10::kFloat;
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> strides = {};
  c10::Device device = c10::kCPU;
  bool conj = false, neg = false;

  static Type contiguous(c10::ScalarType dtype, std::vector<int64_t> sizes, c10::Device device = c10::kCPU);
  static Type of(const at::Tensor& t);

  int64_t numel() const;
  int64_t itemsize() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  int64_t bytes() const { return numel() * itemsize(); }  // of the elements, without gaps
  int64_t span() const;                                   // elements from the first to the last, gaps included
  bool is_contiguous() const;
  bool operator==(const Type&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Type& type);

// Why no tensor can have these sizes: a negative one, or more than 2^63 bytes; "" if one can. All other functions of
// types need valid sizes.
std::string sizes_error(c10::ScalarType dtype, const std::vector<int64_t>& sizes);
// The same for sizes and strides.
std::string type_error(const Type& type);

const char* short_name(c10::ScalarType dtype);            // "f32"
c10::ScalarType dtype_from(std::string_view short_name);  // throws UsageError for an unknown name

}  // namespace tessera::compiler
