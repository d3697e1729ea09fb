#pragma once
#include "tessera/optim/detail/local_tensors.h"

// Gradient norms and clipping for plain and distributed gradients, as torch.nn.utils has them.
// Example:  auto norm = optim::clip_grad_norm_(model->parameters(), 1.0);
namespace tessera::optim {

// Options of get_total_norm and clip_grad_norm_.
struct NormOptions {
  double norm_type = 2;  // greater than 0, or infinity
  // Throws UsageError if the norm is NaN or infinite, before any gradient is scaled. Copies the norm to the host;
  // without this option nothing is copied to the host.
  bool error_if_nonfinite = false;
  bool foreach = true;  // false: one tensor after the other; the results are bitwise equal
};

// The norm of all tensors as of one vector: a plain tensor without dims, the same on every rank. Tensors may be plain
// (taken to be replicated) or distributed over any meshes. Costs one all-reduce per set of sharded mesh axes, for any
// number of tensors:
//
//   W S(0) on tp=2,  b R on tp=2,  E [S(0), S(1)] on dp=2,tp=2      ->  tp for W;  dp and tp for E;  none for b
//
// Partial tensors are reduced first, because the norm of a sum does not follow from the norms of its parts.
// The result is PyTorch's; with distributed tensors it is rounded once per set of axes and once in total.
at::Tensor get_total_norm(const Tensors& tensors, const NormOptions& options = {});

// Scales all gradients in place so that their total norm is at most max_norm. Returns the norm before scaling. Skips
// parameters without gradient. A Partial gradient is replaced by its sum.
at::Tensor clip_grad_norm_(const Tensors& parameters, double max_norm, const NormOptions& options = {});

// Scales the gradients as clip_grad_norm_ does, for a norm from get_total_norm.
// Requires: total_norm is a plain tensor of one element.
void clip_grads_with_norm_(const Tensors& parameters, double max_norm, const at::Tensor& total_norm,
                           bool foreach = true);

// Clamps every element of every gradient to [-clip_value, clip_value], in place. A Partial gradient is replaced by its
// sum first.
void clip_grad_value_(const Tensors& parameters, double clip_value, bool foreach = true);

}  // namespace tessera::optim
