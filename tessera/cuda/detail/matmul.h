#pragma once
#include <ATen/core/Tensor.h>

// Matrix products by cuBLASLt. What follows a product is computed on each tile before it is stored, and the algorithm
// of each shape is chosen by measurement.
namespace tessera::cuda {

enum class Epilogue : uint8_t {
  None,
  Bias,      // out = a b + bias
  Gelu,      // aux = a b + bias, out = gelu(aux), approximated by tanh
  GeluGrad,  // out = a b * gelu'(aux)
};

// out = a b. `a` and `b` are matrices, row by row or column by column (a transposed view); `out` has the elements of a
// contiguous matrix. All are bfloat16; sums are made in float.
struct MatmulArgs {
  at::Tensor out, a, b;
  at::Tensor bias = {}, aux = {};  // if the epilogue has them: a row, and elements like `out`
  Epilogue epilogue = Epilogue::None;
};

// The first call with a shape measures up to eight algorithms, unless a CUDA graph is captured.
void matmul(const MatmulArgs& args);

}  // namespace tessera::cuda
