#pragma once
#include <c10/util/ArrayRef.h>

#include <string>
#include <vector>

// Kernels that compiled steps with Numerics::Fast call on the CPU through one op:
//
//   tessera::cpu_kernel(Tensor(a!)[] outs, Tensor[] ins, float[] numbers, str name) -> ()
//
//   name                     outs                                     ins                                 numbers
//   matmul                   product                                  a, b, or a, b, bias
//   matmul_gelu              product, gelu of it                      a, b, bias                          tanh
//   matmul_gelu_backward     product * gelu'(operand)                 a, b, operand                       tanh
//   gelu                     gelu                                     input                               tanh
//   gelu_backward            grad_input                               grad, input                         tanh
//   layer_norm               output, mean, rstd                       input, weight, bias                 eps
//   layer_norm_backward      grad_input, grad_weight, grad_bias       grad, input, mean, rstd, weight
//   layer_norm_backward_add  sum (in place), grad_weight, grad_bias   grad, input, mean, rstd, weight
//   sum_rows                 sum                                      input
//   attention                output, logsumexp                        query, key, value                   causal, scale
//   attention_backward       grad_query, grad_key, grad_value         grad, query, key, value, output,    causal, scale
//                                                                     logsumexp
//   cross_entropy            loss (), logsumexp (N)                   logits (N, C), target (N)           reduction,
//                                                                                                         ignore_index
//   cross_entropy_backward   grad_logits                              grad (), logits, target, logsumexp  reduction,
//                                                                                                         ignore_index
//
// Tensors are float32 (targets int64) and contiguous but for a and b (tiled_product.h), and those of attention, which
// are (batch, heads, length, dim) with unit stride in the last dim. tanh, causal: 0 or 1. Layer norm is over the last
// dim, sum_rows over all others. Sums are made in a fixed order: bits do not depend on the number of threads.
namespace tessera::compiler {

std::vector<std::string> cpu_kernel_names();

}  // namespace tessera::compiler
