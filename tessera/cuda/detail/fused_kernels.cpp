#include "tessera/cuda/detail/fused_kernels.h"

#include "tessera/base/error.h"
#include "tessera/cuda/detail/bf16_source.h"
#include "tessera/cuda/detail/kernel.h"
#include "tessera/cuda/detail/layer_norm_source.h"
#include "tessera/cuda/detail/matmul.h"
#include "tessera/cuda/detail/sum_rows_source.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

namespace tessera::cuda {
namespace {

constexpr int64_t kElementsPerVector = 256;  // of a warp: 32 lanes x 8 bf16
constexpr int64_t kMaxVectors = 4;           // more do not fit into registers
constexpr int64_t kRowsPerBlock = 8;         // one per warp
constexpr int64_t kBlocks = 264;             // two per processor of an H200

struct LayerNormKernels {
  std::string source;
  Kernel forward, backward, sum_partials;
  explicit LayerNormKernels(int64_t length)
      : source(layer_norm_source(length)),
        forward(source.c_str(), "layer_norm_forward"),
        backward(source.c_str(), "layer_norm_backward"),
        sum_partials(source.c_str(), "layer_norm_sum_partials") {}
};

const LayerNormKernels& layer_norm_kernels(int64_t length) {
  static std::mutex mutex;
  static auto* by_length = new std::map<int64_t, std::unique_ptr<LayerNormKernels>>;
  const std::lock_guard lock(mutex);
  auto& kernels = (*by_length)[length];
  if (!kernels) kernels = std::make_unique<LayerNormKernels>(length);
  return *kernels;
}

struct Rows {
  int64_t rows, length;
  explicit Rows(const at::Tensor& t) : rows(t.numel() / std::max<int64_t>(t.size(-1), 1)), length(t.size(-1)) {}
  int64_t blocks() const { return std::min((rows + kRowsPerBlock - 1) / kRowsPerBlock, kBlocks); }
};

// outs: [sum], output, [mean], rstd; ins: input, [addend], weight, [bias]. RMS norm has neither mean nor bias.
template <bool kIsRms, bool kAdds>
void norm(at::TensorList outs, at::TensorList ins, at::ArrayRef<double> numbers) {
  const auto& x = ins[0];
  const Rows size(x);
  const auto out = outs.slice(kAdds), in = ins.slice(kAdds);
  layer_norm_kernels(size.length)
      .forward.launch(x.device(), {.blocks = size.blocks()}, x.const_data_ptr(),
                      kAdds ? ins[1].const_data_ptr() : nullptr, in[1].const_data_ptr(),
                      kIsRms ? nullptr : in[2].const_data_ptr(), static_cast<float>(numbers[0]), size.rows,
                      kAdds ? outs[0].mutable_data_ptr() : nullptr, out[0].mutable_data_ptr(),
                      kIsRms ? nullptr : out[1].mutable_data_ptr(), out.back().mutable_data_ptr());
}

// outs: grad_input, grad_weight, [grad_bias]; ins: grad, input, [mean], rstd, weight. kAdds: adds to grad_input.
template <bool kIsRms, bool kAdds>
void norm_backward(at::TensorList outs, at::TensorList ins, at::ArrayRef<double>) {
  constexpr int64_t kGradients = kIsRms ? 1 : 2;  // of weight and bias
  const auto& x = ins[1];
  const Rows size(x);
  const auto in = ins.slice(kIsRms ? 2 : 3);
  const auto partial = at::empty({size.blocks(), 2, size.length}, x.options().dtype(at::kFloat));
  const auto& kernels = layer_norm_kernels(size.length);
  kernels.backward.launch(x.device(), {.blocks = size.blocks()}, ins[0].const_data_ptr(), x.const_data_ptr(),
                          kIsRms ? nullptr : ins[2].const_data_ptr(), in[0].const_data_ptr(), in[1].const_data_ptr(),
                          kAdds ? outs[0].const_data_ptr() : nullptr, size.rows, outs[0].mutable_data_ptr(),
                          partial.mutable_data_ptr());
  kernels.sum_partials.launch(x.device(), {.blocks = kGradients * size.length / 32}, partial.const_data_ptr(),
                              static_cast<int>(size.blocks()), outs[1].mutable_data_ptr(),
                              kIsRms ? nullptr : outs[2].mutable_data_ptr());
}

void sum_rows(at::TensorList outs, at::TensorList ins, at::ArrayRef<double>) {
  static const Kernel parts_kernel(kSumRowsSource, "sum_rows_parts"), total_kernel(kSumRowsSource, "sum_rows_total");
  const auto& x = ins[0];
  const Rows size(x);
  const auto tiles = (size.length + 255) / 256;
  const auto parts = std::clamp<int64_t>(2 * kBlocks / tiles, 1, std::max<int64_t>(size.rows / 64, 1));
  const auto partial = at::empty({parts, size.length}, x.options().dtype(at::kFloat));
  parts_kernel.launch(x.device(), {.blocks = tiles * parts}, x.const_data_ptr(), size.rows, size.length,
                      static_cast<int>(parts), partial.mutable_data_ptr());
  total_kernel.launch(x.device(), {.blocks = (size.length + 31) / 32}, partial.const_data_ptr(), size.length,
                      static_cast<int>(parts), outs[0].mutable_data_ptr());
}

void matmul_plain(at::TensorList outs, at::TensorList ins, at::ArrayRef<double>) {
  matmul({.out = outs[0], .a = ins[0], .b = ins[1]});
}

void matmul_bias(at::TensorList outs, at::TensorList ins, at::ArrayRef<double>) {
  matmul({.out = outs[0], .a = ins[0], .b = ins[1], .bias = ins[2], .epilogue = Epilogue::Bias});
}

void matmul_gelu(at::TensorList outs, at::TensorList ins, at::ArrayRef<double>) {
  matmul({.out = outs[0], .a = ins[0], .b = ins[1], .bias = ins[2], .aux = outs[1], .epilogue = Epilogue::Gelu});
}

void matmul_gelu_grad(at::TensorList outs, at::TensorList ins, at::ArrayRef<double>) {
  matmul({.out = outs[0], .a = ins[0], .b = ins[1], .aux = ins[2], .epilogue = Epilogue::GeluGrad});
}

using FusedKernel = void (*)(at::TensorList outs, at::TensorList ins, at::ArrayRef<double> numbers);
const std::map<std::string_view, FusedKernel> kFusedKernels = {
    {"layer_norm", norm<false, false>},
    {"add_layer_norm", norm<false, true>},
    {"layer_norm_backward", norm_backward<false, false>},
    {"layer_norm_backward_add", norm_backward<false, true>},
    {"rms_norm", norm<true, false>},
    {"add_rms_norm", norm<true, true>},
    {"rms_norm_backward", norm_backward<true, false>},
    {"rms_norm_backward_add", norm_backward<true, true>},
    {"sum_rows", sum_rows},
    {"matmul", matmul_plain},
    {"matmul_bias", matmul_bias},
    {"matmul_gelu", matmul_gelu},
    {"matmul_gelu_grad", matmul_gelu_grad},
};

void run_fused_kernel(at::TensorList outs, at::TensorList ins, at::ArrayRef<double> numbers, std::string_view name) {
  const auto found = kFusedKernels.find(name);
  TESSERA_CHECK(found != kFusedKernels.end(), UsageError, "tessera::cuda_kernel: unknown kernel \"", name, "\"");
  found->second(outs, ins, numbers);
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("cuda_kernel(Tensor(a!)[] outs, Tensor[] ins, float[] numbers, str name) -> ()");
}
TORCH_LIBRARY_IMPL(tessera, CUDA, m) { m.impl("cuda_kernel", run_fused_kernel); }

}  // namespace

bool has_layer_norm(c10::Device device, c10::ScalarType dtype, int64_t length) {
  return dtype == at::kBFloat16 && length % kElementsPerVector == 0 && length > 0 &&
         length / kElementsPerVector <= kMaxVectors && can_launch(device);
}

bool has_sum_rows(c10::Device device, c10::ScalarType dtype, int64_t columns) {
  return dtype == at::kBFloat16 && columns % 8 == 0 && columns > 0 && can_launch(device);
}

std::string layer_norm_source(int64_t length) {
  return "#define VECTORS " + std::to_string(length / kElementsPerVector) + "\n" + kBf16Source + kLayerNormSource;
}

}  // namespace tessera::cuda
