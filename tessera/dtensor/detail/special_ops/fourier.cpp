#include <ATen/core/Tensor.h>
#include <ATen/ops/_fft_c2c.h>
#include <ATen/ops/_fft_c2r.h>
#include <ATen/ops/_fft_r2c.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

// Fourier transforms of local tensors (rules/batch.cpp). They take the arguments of the aten op and the sizes of the
// local result. The result is contiguous. aten's ops give strides that depend on the device, and throw for a tensor
// without elements.
namespace tessera {
namespace {

at::Tensor fft_c2c(const at::Tensor& self, at::IntArrayRef dim, int64_t normalization, bool forward,
                   at::IntArrayRef sizes) {
  if (self.numel() == 0) return at::empty(sizes, self.options());
  return at::_fft_c2c(self, dim, normalization, forward).contiguous();
}

at::Tensor fft_r2c(const at::Tensor& self, at::IntArrayRef dim, int64_t normalization, bool onesided,
                   at::IntArrayRef sizes) {
  if (self.numel() == 0) return at::empty(sizes, self.options().dtype(c10::toComplexType(self.scalar_type())));
  return at::_fft_r2c(self, dim, normalization, onesided).contiguous();
}

at::Tensor fft_c2r(const at::Tensor& self, at::IntArrayRef dim, int64_t normalization, int64_t last_dim_size,
                   at::IntArrayRef sizes) {
  if (self.numel() == 0) return at::empty(sizes, self.options().dtype(c10::toRealValueType(self.scalar_type())));
  return at::_fft_c2r(self, dim, normalization, last_dim_size).contiguous();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("_fft_c2c_local(Tensor self, int[] dim, int normalization, bool forward, int[] out) -> Tensor");
  m.def("_fft_r2c_local(Tensor self, int[] dim, int normalization, bool onesided, int[] out) -> Tensor");
  m.def("_fft_c2r_local(Tensor self, int[] dim, int normalization, int last_dim_size, int[] out) -> Tensor");
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("_fft_c2c_local", fft_c2c);
  m.impl("_fft_r2c_local", fft_r2c);
  m.impl("_fft_c2r_local", fft_c2r);
}

}  // namespace tessera
