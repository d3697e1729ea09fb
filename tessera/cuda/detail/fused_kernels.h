#pragma once
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

// Kernels that compiled steps call on CUDA through one op:
//
//   tessera::cuda_kernel(Tensor(a!)[] outs, Tensor[] ins, float[] numbers, str name) -> ()
//
//   name                     outs                                       ins                                    numbers
//   layer_norm               output, mean, rstd                         input, weight, bias                    eps
//   add_layer_norm           sum, output, mean, rstd                    input, addend, weight, bias            eps
//   layer_norm_backward      grad_input, grad_weight, grad_bias         grad, input, mean, rstd, weight
//   layer_norm_backward_add  sum (in place), grad_weight, grad_bias     grad, input, mean, rstd, weight
//   rms_norm                 output, rstd                               input, weight                          eps
//   add_rms_norm             sum, output, rstd                          input, addend, weight                  eps
//   rms_norm_backward        grad_input, grad_weight                    grad, input, rstd, weight
//   rms_norm_backward_add    sum (in place), grad_weight                grad, input, rstd, weight
//   sum_rows                 sum                                        input
//   matmul                   product                                    a, b
//   matmul_bias              product                                    a, b, bias
//   matmul_gelu              gelu, product                              a, b, bias
//   matmul_gelu_grad         product * gelu'(aux)                       a, b, aux
//
// Tensors are bfloat16, contiguous but for a and b (matmul.h); mean and rstd are float. Norms are over the last
// dim, sum_rows over all others. Every element is read and written once, and sums are made in a fixed order.
namespace tessera::cuda {

bool has_layer_norm(c10::Device device, c10::ScalarType dtype, int64_t length);
bool has_sum_rows(c10::Device device, c10::ScalarType dtype, int64_t columns);

// The source of layer norm and RMS norm for rows of this length.
std::string layer_norm_source(int64_t length);

}  // namespace tessera::cuda
